// Sums of products of 8-bit integers, four neighboring k at a time, on every CPU.
//
// An operand of the weight is a byte, of x a signed byte in -127 .. 127. All sums are exact, so it does not matter
// which instructions a CPU has for them.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm_vec.h"

namespace quire_gemm {
namespace {

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

constexpr int kQuad = 4 * kLanes;  // bytes of one vector of columns times four k

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int kCodeOffset = 128;  // the instruction takes the weight's byte as unsigned: signed ones are shifted
#else
constexpr int kCodeOffset = 0;
#endif

// Where vectors are this long: gemm_vec.h has short ones for a CPU with AVX2 but without fused multiply-adds.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define QUIRE_DOTS_OF_EIGHT 1
#endif

#if defined(QUIRE_DOTS_OF_EIGHT) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHardware = true;
#else
constexpr bool kHardware = false;
#endif

#if defined(QUIRE_DOTS_OF_EIGHT)
// Eight columns.
QUIRE_INLINE __m256i dot_signed(__m256i sum, __m256i w, __m256i x) {
  const __m256i size = _mm256_abs_epi8(w), signed_x = _mm256_sign_epi8(x, w);
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, size, signed_x);
#else
  // Neither factor is -128, so a pair of products fits 16 bits.
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), _mm256_set1_epi16(1)));
#endif
}
#endif

// Adds to each column the products of its four bytes at `w` and the four at `x`.
QUIRE_INLINE Ints dot(Ints sum, Ints w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof(four));
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return bit_cast<Ints>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(w), _mm512_set1_epi32(four)));
#elif defined(QUIRE_DOTS_OF_EIGHT)
  const __m256i all = _mm256_set1_epi32(four);
  __m256i parts[kLanes / 8], weights[kLanes / 8];
  std::memcpy(parts, &sum, sizeof(sum));
  std::memcpy(weights, &w, sizeof(w));
  for (int i = 0; i < kLanes / 8; ++i) parts[i] = dot_signed(parts[i], weights[i], all);
  std::memcpy(&sum, parts, sizeof(sum));
  return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
  return bit_cast<Ints>(vdotq_s32(bit_cast<int32x4_t>(sum), bit_cast<int8x16_t>(w),
                                  vreinterpretq_s8_s32(vdupq_n_s32(four))));
#else
  int8_t bytes[kQuad];
  std::memcpy(bytes, &w, sizeof(w));
  for (int c = 0; c < kLanes; ++c) {
    for (int j = 0; j < 4; ++j) sum[c] += bytes[4 * c + j] * x[j];
  }
  return sum;
#endif
}

QUIRE_INLINE uint32_t largest(VecBits v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32(bit_cast<__m512i>(v));
#else
  uint32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

QUIRE_INLINE uint32_t total(VecBits v) {
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_reduce_add_epi32(bit_cast<__m512i>(v)));
#else
  uint32_t sum = v[0];
  for (int i = 1; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// The lowest byte of each lane.
QUIRE_INLINE void store_bytes(VecBits v, int8_t* out) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  const Bytes bytes = __builtin_convertvector(v, Bytes);
  std::memcpy(out, &bytes, sizeof(bytes));
}

QUIRE_INLINE Ints load_codes(const uint8_t* p) {
  Ints v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

QUIRE_INLINE Ints fill(int32_t x) {
  return x - Ints{};
}

QUIRE_INLINE Vec to_floats(Ints v) { return __builtin_convertvector(v, Vec); }

}  // namespace
}  // namespace quire_gemm
