// Vectors of floats for every CPU, and the float types of the tensors.
//
// Built on the vector extensions of GCC and Clang; intrinsics stand only where the extensions have no word for
// an instruction (fused multiply-add, conversion of half floats). Every operation rounds as written: products
// that are to be fused say fma(), so that two instantiations of one template give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__) || defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace quire {

#if defined(QUIRE_LANES)  // to try a width that this CPU has not got: the compiler makes do with what there is
#elif defined(__AVX512F__)
#define QUIRE_LANES 16
#elif defined(__AVX2__)
#define QUIRE_LANES 8
#else
#define QUIRE_LANES 4  // NEON, SSE2 and others
#endif
constexpr int LANES = QUIRE_LANES;

// Rounds to bfloat16 in one instruction, which takes subnormal numbers as zero, as do the products there.
#if QUIRE_LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define QUIRE_ROUNDS_BF16 1
#endif

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef double vd __attribute__((vector_size(LANES * 4)));  // half as many
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float v4 __attribute__((vector_size(16)));  // the last steps of a sum over lanes
typedef int32_t i4 __attribute__((vector_size(16)));

// Elements of a and b in a new order; `ints` is the integer vector of their shape.
#if defined(__clang__) || __GNUC__ >= 12
#define QUIRE_SHUFFLE(ints, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define QUIRE_SHUFFLE(ints, a, b, ...) __builtin_shuffle(a, b, ints{__VA_ARGS__})
#endif

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

template <class To, class From>
static inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "a cast keeps every bit");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

static inline vf splat(float x) { return x - vf{}; }

static inline vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof(vf));
    return v;
}
// Of LANES / 2 floats.
static inline vd load_doubles(const float* p) {
#if QUIRE_LANES == 16 && defined(__AVX512F__)
    return _mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif QUIRE_LANES == 8 && defined(__AVX__)
    return _mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    typedef float Floats __attribute__((vector_size(LANES * 2)));
    Floats v;
    std::memcpy(&v, p, sizeof(v));
    return __builtin_convertvector(v, vd);
#endif
}
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(vf)); }

static inline vf fma(vf a, vf b, vf c) {
#if QUIRE_LANES == 16 && defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif QUIRE_LANES == 8 && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif QUIRE_LANES == 4 && defined(__FMA__)
    return _mm_fmadd_ps(a, b, c);
#elif QUIRE_LANES == 4 && defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// A NaN in `a` is kept, as in torch.
static inline vf max(vf a, vf b) { return b > a ? b : a; }

// Folds the lanes of a vector in halves: a fixed order.
template <class Op>
static inline float fold(vf v, const Op& op) {
    v4 quarter[LANES / 4];
    std::memcpy(quarter, &v, sizeof(v));
    for (int n = LANES / 8; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) quarter[i] = op(quarter[i], quarter[i + n]);
    const v4 pair = op(quarter[0], QUIRE_SHUFFLE(i4, quarter[0], quarter[0], 2, 3, 0, 1));
    return op(pair, QUIRE_SHUFFLE(i4, pair, pair, 1, 0, 3, 2))[0];
}
static inline float sum(vf v) {
    return fold(v, [](auto a, auto b) { return a + b; });
}
static inline float max(vf v) {
    return fold(v, [](auto a, auto b) { return b > a ? b : a; });
}

// 2 ** part to about 1e-7 relative, for what is left of a number beside the nearest integer: a minimax polynomial of
// degree 5.
static inline vf exp2_of_part(vf part) {
    vf y = splat(1.326472725e-3f);
    y = fma(y, part, splat(9.671512786e-3f));
    y = fma(y, part, splat(5.550733744e-2f));
    y = fma(y, part, splat(2.402224208e-1f));
    y = fma(y, part, splat(6.931469776e-1f));
    return fma(y, part, splat(1.0f));
}

// 2 ** x for x <= 128, exactly scaled by the nearest integer. Below -126 the result is 0, at 128 it is infinite, NaN
// stays NaN.
static inline vf exp2(vf x) {
    const vu tiny = bit_cast<vu>(x < splat(-126.0f));
    x = max(x, splat(-126.0f));
    const vf shift = splat(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer, in the lowest bits
    const vf shifted = x + shift, part = x - (shifted - shift);
    const vf y = exp2_of_part(part);
    return bit_cast<vf>((bit_cast<vu>(y) + (bit_cast<vu>(shifted) << 23)) & ~tiny);
}
static inline float exp2(float x) { return exp2(splat(x))[0]; }

#if QUIRE_LANES == 16 && defined(__AVX512F__)
// As exp2() from `least` on, scaled by one instruction; less is taken for `least`.
static inline vf exp2_from(float least, vf x) {
    x = _mm512_max_ps(splat(least), x);  // in this order a NaN stays
    const vf whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_of_part(x - whole), whole);
}
#endif

// 1 + 2 ** x for x <= 128, to the bit as exp2() gives it.
static inline vf one_plus_exp2(vf x) {
#if QUIRE_LANES == 16 && defined(__AVX512F__)
    return splat(1.0f) + exp2_from(-126.0f, x);
#else
    return splat(1.0f) + exp2(x);
#endif
}

// tanh(x) to a few units in the last place, also near 0. It is e / (e + 2) with e = 2 ** t - 1 and t = 2 log2(e) x:
// exact scaling by the nearest integer of t, a Taylor series of 2 ** part - 1 for the rest. NaN stays NaN.
static inline vf tanh(vf x) {
    const vf most = splat(30.0f);  // from here on the result is 1
    vf t = x * splat(2.885390081777927f);
    t = t > most ? most : t;
    t = t < -most ? -most : t;
    const vf shift = splat(12582912.0f);  // as in exp2()
    const vf shifted = t + shift, part = t - (shifted - shift);
    vf y = splat(1.525273380e-5f);
    y = fma(y, part, splat(1.540353039e-4f));
    y = fma(y, part, splat(1.333355815e-3f));
    y = fma(y, part, splat(9.618129108e-3f));
    y = fma(y, part, splat(5.550410866e-2f));
    y = fma(y, part, splat(2.402265070e-1f));
    y = fma(y, part, splat(6.931471806e-1f));
    const vf power = bit_cast<vf>((bit_cast<vu>(shifted) << 23) + 0x3f800000u);
    const vf e = fma(power, y * part, power - splat(1.0f));
    return e / (e + splat(2.0f));
}

// cap * tanh(x / cap)
static inline vf soft_cap(vf x, float cap) { return splat(cap) * tanh(x * splat(1.0f / cap)); }

// ---- bfloat16 -----------------------------------------------------------------------------------------------

static inline vu round_bits(vf x) {  // to the upper 16 bits, to nearest even
    const vu u = bit_cast<vu>(x);
    const vu rounded = u + 0x7fffu + ((u >> 16) & 1u);
    const vu nan = bit_cast<vu>(x != x);
    return (rounded & ~nan) | (0x7fc00000u & nan);
}

static inline vf load(const bf16* p) {
    vh h;
    std::memcpy(&h, p, sizeof(vh));
    return bit_cast<vf>(__builtin_convertvector(h, vu) << 16);
}
#if defined(QUIRE_ROUNDS_BF16)
static inline void store(bf16* p, vf v) {
    const __m256bh rounded = _mm512_cvtneps_pbh(v);
    std::memcpy(p, &rounded, sizeof(rounded));
}
#else
static inline void store(bf16* p, vf v) {
    const vh h = __builtin_convertvector(round_bits(v) >> 16, vh);
    std::memcpy(p, &h, sizeof(vh));
}
#endif

// ---- float16 ------------------------------------------------------------------------------------------------

static inline vf widen(vh h) {
    const vu u = __builtin_convertvector(h, vu);
    const vf scaled = bit_cast<vf>((u & 0x7fffu) << 13) * splat(5.192296858534828e33f);  // 2 ** 112
    const vu special = bit_cast<vu>((u & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return bit_cast<vf>(bit_cast<vu>(scaled) | special | ((u & 0x8000u) << 16));
}

static inline uint16_t narrow(float x) {
    const uint32_t u = bit_cast<uint32_t>(x), magnitude = u & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    if (magnitude < 0x38800000u)  // subnormal: adding 0.5 leaves the rounded multiple of 2 ** -24
        return sign | static_cast<uint16_t>(bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u);
    return sign | static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

static inline vf load(const fp16* p) {
#if QUIRE_LANES == 16 && defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif QUIRE_LANES == 8 && defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vh h;
    std::memcpy(&h, p, sizeof(vh));
    return widen(h);
#endif
}
static inline void store(fp16* p, vf v) {
#if QUIRE_LANES == 16 && defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif QUIRE_LANES == 8 && defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES; ++i) p[i].bits = narrow(v[i]);
#endif
}

// ---- whole types --------------------------------------------------------------------------------------------

// `v` as it would read back after a store to T.
template <class T>
static inline vf rounded(vf v) {
    T stored[LANES];
    store(stored, v);
    return load(stored);
}
template <>
inline vf rounded<float>(vf v) {
    return v;
}
template <>
inline vf rounded<bf16>(vf v) {
#if defined(QUIRE_ROUNDS_BF16)
    return bit_cast<vf>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(_mm512_cvtneps_pbh(v))), 16));
#else
    return bit_cast<vf>(round_bits(v) & 0xffff0000u);
#endif
}

// The first `n` lanes from memory, zero in the rest; nothing past them is read.
template <class T>
static inline vf load_some(const T* p, int n) {
    if (n >= LANES) return load(p);
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
template <class T>
static inline void store_some(T* p, vf v, int n) {
    if (n >= LANES) return store(p, v);
    T padded[LANES];
    store(padded, v);
    std::memcpy(p, padded, n * sizeof(T));
}

// Stores those of `v` that are at least `least`, one after the other, and returns their number; all LANES floats
// from `p` on may change.
static inline int store_from(float* p, vf v, float least) {
#if QUIRE_LANES == 16 && defined(__AVX512F__)
    const __mmask16 wanted = _mm512_cmp_ps_mask(v, splat(least), _CMP_GE_OQ);
    store(p, _mm512_maskz_compress_ps(wanted, v));
    return __builtin_popcount(wanted);
#else
    int count = 0;
    for (int lane = 0; lane < LANES; ++lane) {  // no branch: it would be guessed wrong half of the time
        p[count] = v[lane];
        count += v[lane] >= least;
    }
    return count;
#endif
}

// A unit is 2 * LANES neighbors, held as two vectors. Which element stands in which vector is the type's own
// business, the same in load_part and store_unit: for bfloat16 the even ones and the odd ones, because one
// shift or one mask then widens them.
constexpr int UNIT = 2 * LANES;

template <int PART>
static inline vf load_part(const float* p) {
    return load(p + PART * LANES);
}
template <int PART>
static inline vf load_part(const fp16* p) {
    return load(p + PART * LANES);
}
template <int PART>
static inline vf load_part(const bf16* p) {
    vu both;
    std::memcpy(&both, p, sizeof(vu));
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "these kernels know little-endian CPUs only"
#endif
    return bit_cast<vf>(PART == 0 ? both << 16 : both & 0xffff0000u);
}
static inline void store_unit(float* p, vf a, vf b) {
    store(p, a);
    store(p + LANES, b);
}
static inline void store_unit(fp16* p, vf a, vf b) {
    store(p, a);
    store(p + LANES, b);
}
static inline void store_unit(bf16* p, vf a, vf b) {
#if defined(QUIRE_ROUNDS_BF16)
    typedef uint16_t Words __attribute__((vector_size(64)));
    constexpr Words order{0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i rounded = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
    _mm512_storeu_si512(p, _mm512_permutexvar_epi16(bit_cast<__m512i>(order), rounded));
#else
    const vu both = (round_bits(a) >> 16) | (round_bits(b) & 0xffff0000u);
    std::memcpy(p, &both, sizeof(vu));
#endif
}

}  // namespace quire
