// One vector of float32 lanes and what the matrix product does with it, for AVX-512, AVX2, NEON and any other CPU.
//
// Fused multiply-adds are intrinsics and not `a * b + c`: compilers may keep those apart (GCC does for chains of
// 256-bit ones when tuning for Zen), and a chain must round the same in every variant of the micro-kernel.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__clang__)
#define QUIRE_UNROLL _Pragma("unroll")
#else
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
#endif
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire_gemm {

// kMaxRows is the tallest tile: two vectors of accumulators a row, two of weights and one of x fill the registers.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kMaxRows = 12;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
constexpr int kMaxRows = 6;
#elif defined(__ARM_NEON) && defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kMaxRows = 12;
#else
constexpr int kLanes = 4;
constexpr int kMaxRows = 6;
#endif

constexpr int kWidth = 2 * kLanes;  // columns of a panel

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecBits __attribute__((vector_size(4 * kLanes)));

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class To, class From>
QUIRE_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

QUIRE_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

QUIRE_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

QUIRE_INLINE Vec broadcast(float s) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(s);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_set1_ps(s);
#else
  Vec v = {};
  for (int i = 0; i < kLanes; ++i) v[i] = s;
  return v;
#endif
}

QUIRE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return bit_cast<Vec>(vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// ---- one element, to and from float32 (round to nearest even, NaN stays NaN) ----

QUIRE_INLINE float widen(float x) { return x; }

QUIRE_INLINE float widen(Bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

QUIRE_INLINE float widen(Fp16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  return static_cast<float>(bit_cast<__fp16>(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  // Scaling the shifted bits by 2^112 moves the exponent's bias and makes denormals normal.
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(rest << 13) * 0x1p112f));
#endif
}

QUIRE_INLINE void narrow(float x, float* out) { *out = x; }

QUIRE_INLINE void narrow(float x, Bf16* out) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const uint32_t quiet_nan = bits >> 16 | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

QUIRE_INLINE void narrow(float x, Fp16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  out->bits = bit_cast<uint16_t>(static_cast<__fp16>(x));
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  uint32_t rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) {
    rest = 0x7e00u;
  } else if (rest >= 0x477ff000u) {  // 65520 and above round to infinity
    rest = 0x7c00u;
  } else if (rest < 0x38800000u) {  // denormal: adding 0.5 rounds at the last bit kept
    rest = bit_cast<uint32_t>(bit_cast<float>(rest) + 0.5f) - 0x3f000000u;
  } else {
    rest = (rest + 0xfffu + (rest >> 13 & 1u) - 0x38000000u) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | rest);
#endif
}

// ---- one row of a panel: kWidth weights as two vectors ----

// Where column `c` of a panel's row is stored. bf16 pairs column i with column i + kLanes in one 32-bit lane,
// so that a shift and a mask widen both halves.
template <class W>
constexpr int column_slot(int c) {
  return c;
}
template <>
constexpr int column_slot<Bf16>(int c) {
  return c < kLanes ? 2 * c : 2 * (c - kLanes) + 1;
}

QUIRE_INLINE void load_pair(const float* p, Vec& low, Vec& high) {
  low = load(p);
  high = load(p + kLanes);
}

QUIRE_INLINE void load_pair(const Bf16* p, Vec& low, Vec& high) {
  VecBits both;
  std::memcpy(&both, p, sizeof(both));
  low = bit_cast<Vec>(both << 16);
  high = bit_cast<Vec>(both & 0xffff0000u);
}

QUIRE_INLINE void load_pair(const Fp16* p, Vec& low, Vec& high) {
#if defined(__AVX512F__)
  low = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  high = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + kLanes)));
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kLanes)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(p);
  low = bit_cast<Vec>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits))));
  high = bit_cast<Vec>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits + kLanes))));
#else
  low = high = Vec{};
  for (int i = 0; i < kLanes; ++i) {
    low[i] = widen(p[i]);
    high[i] = widen(p[i + kLanes]);
  }
#endif
}

}  // namespace quire_gemm
