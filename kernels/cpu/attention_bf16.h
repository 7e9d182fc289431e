// One tile of paged attention in bfloat16 on CPUs that multiply it in hardware.
//
// VDPBF16PS adds two products to each of 16 sums. A score is one chain of it over the pairs of a head's elements; a
// weighted value is one chain over the pairs of positions that its row sees, counted from the start of the sequence.
// Weights are rounded to bfloat16 first. A tile is laid out anew in pairs: keys so that 16 of them fill a vector, and
// values so that two positions lie side by side. Decode does so, too, at the speed of memory, and so has the same bits.
#pragma once

#include "attention_tile.h"
#include "gemm_bf16.h"

#if defined(QUIRE_BF16_PRODUCTS) && QUIRE_LANES == 16
#define QUIRE_BF16_ATTENTION 1

namespace quire {
namespace {

using quire_gemm::dot;
using quire_gemm::round_pair;

constexpr int PAIR_ROWS = 6;     // of queries at a time: 24 sums, four vectors of keys or values, one of the rows'
constexpr int PARTS = TILE / 16;  // vectors of a row's scores

static inline __m512i broadcast_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof(pair));
    return _mm512_set1_epi32(pair);
}

// A tile that is fetched while another one is worked on, a few lines of 64 bytes at a time: the memory answers best to
// a steady flow, and to several rows side by side, each in the order of its addresses. Each element of a head of a tile
// has 4 lines to fetch, keys and values together, and what is below has a place for each.
class Fetch {
  public:
    Fetch() = default;

    // `size` elements from `offset` on of each row of `tile`, keys and then values. `before` is what was fetched last,
    // from the same offset on, or null.
    Fetch(const bf16* const* tile, const bf16* const* before, int64_t offset, int64_t size)
        : tile_(tile), before_(before), offset_(offset), size_(size), left_(STEPS) {
        const int64_t lines = (size + LINE - 1) / LINE;
        repeat_lag_ = std::clamp<int64_t>(REPEAT_LINES / lines, 1, STEPS);
        read_lag_ = std::clamp<int64_t>(READ_LINES / lines, 1, STEPS);
        start_rows<true>();
    }

    bool done() const { return left_ == 0; }

    // A line of STREAMS rows. The CPU drops a prefetch while about 100 lines are under way, and arithmetic is faster
    // than the memory, so some would be missing when they are needed. PACED: each is asked for again later, and still
    // later a byte of it is read, so that the prefetches wait for the memory.
    template <bool PACED>
    QUIRE_INLINE void some() {
        if (left_ == 0) return;
        const bool paced = PACED && read_ != nullptr;
        QUIRE_UNROLL for (int64_t s = 0; s < STREAMS * PART; s += PART) {
            if (paced) {
                static_cast<void>(*reinterpret_cast<const volatile char*>(read_[s] + at_));
                __builtin_prefetch(repeat_[s] + at_, 0, 3);
            }
            __builtin_prefetch(rows_[s] + at_, 0, 3);
        }
        at_ += LINE;
        if (at_ - offset_ < size_) return;
        --left_;
        start_rows<PACED>();
    }

    // For loops of many rows, which have no time for it.
    void steps(int64_t count) {
        for (; count > 0 && !done(); --count) some<false>();
    }

  private:
    static constexpr int64_t STREAMS = 4;            // rows side by side
    static constexpr int64_t PART = TILE / STREAMS;  // from one of them to the next
    static constexpr int64_t STEPS = 2 * PART;       // first keys, then values
    static constexpr int64_t LINE = 32;              // elements
    static constexpr int64_t REPEAT_LINES = 24, READ_LINES = 48;  // of a stream, behind its prefetches

    const bf16* const* rows_of(int64_t step) const {
        const bf16* const* tile = step < 0 ? before_ : tile_;
        step &= STEPS - 1;
        return tile == nullptr ? nullptr : tile + step / PART * TILE + step % PART;
    }

    template <bool PACED>
    void start_rows() {
        const int64_t step = STEPS - left_;
        at_ = offset_, rows_ = rows_of(step), read_ = nullptr;
        if (PACED) repeat_ = rows_of(step - repeat_lag_), read_ = rows_of(step - read_lag_);
    }

    const bf16 *const *tile_ = nullptr, *const *before_ = nullptr;
    const bf16 *const *rows_ = nullptr, *const *repeat_ = nullptr, *const *read_ = nullptr;
    int64_t offset_ = 0, size_ = 0, at_ = 0, left_ = 0, repeat_lag_ = 0, read_lag_ = 0;
};

// 16 keys from `keys`, elements offset .. offset + 31: pair after pair, of all keys.
static QUIRE_INLINE void turn_keys(const bf16* const* keys, int64_t offset, __mmask32 there, __m512i* pairs) {
    __m512i a[16], b[16];
    QUIRE_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi16(there, keys[i] + offset);
    QUIRE_UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    QUIRE_UNROLL for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    QUIRE_UNROLL for (int i = 0; i < 8; ++i) {
        pairs[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        pairs[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    }
}

// 32 elements of two positions' values, side by side: low has elements 0 .. 3 of every 8, high has 4 .. 7. That takes
// one instruction each; what is summed stays in this order until a row is written (in_order()).
static QUIRE_INLINE void pair_values(const bf16* even, const bf16* odd, __mmask32 there, __m512i& low, __m512i& high) {
    const __m512i a = _mm512_maskz_loadu_epi16(there, even), b = _mm512_maskz_loadu_epi16(there, odd);
    low = _mm512_unpacklo_epi16(a, b);
    high = _mm512_unpackhi_epi16(a, b);
}

// 32 elements in the order of pair_values(), rounded, in their own order.
static QUIRE_INLINE __m512i in_order(__m512i rounded) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), rounded);
}

// Which of the 32 elements from `from` on a head of `head_dim` has.
static inline __mmask32 there_of(int64_t from, int64_t head_dim) {
    return head_dim - from >= 32 ? ~__mmask32(0) : (__mmask32(1) << (head_dim - from)) - 1;
}

// 2 ** x for x <= 0, below -126 not normal numbers, too.
static inline __m512 power_of_two(__m512 x) { return exp2_from(-200.0f, x); }

// acc = acc * decay + weights @ values for 16 * VECTORS elements, over the pairs of positions begin .. end - 1.
// `keep` takes out of each pair what the rows do not see.
template <int ROWS, int VECTORS>
static inline void weigh_pairs(const bf16* weights, const char* values, int64_t stride, int64_t begin, int64_t end,
                               float* acc, int64_t dim, const float* decay, __m512i keep) {
    __m512 sums[ROWS][VECTORS];
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) {
            sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(acc + r * dim + v * 16), _mm512_set1_ps(decay[r]));
        }
    }
    for (int64_t t = begin; t < end; ++t) {
        __m512i value[VECTORS];
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) {
            value[v] = _mm512_loadu_si512(values + t * stride + v * 64);
            if (ROWS == 1) value[v] = _mm512_and_si512(value[v], keep);
        }
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512i weight = broadcast_pair(weights + r * TILE + 2 * t);
            QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], value[v], weight);
        }
    }
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(acc + r * dim + v * 16, sums[r][v]);
    }
}

template <int ROWS>
static void weigh_all(const bf16* weights, const char* values, int64_t begin, int64_t end, float* acc, int64_t dim,
                      const float* decay, __m512i keep) {
    int64_t i = 0;
    for (; i + 64 <= dim; i += 64)
        weigh_pairs<ROWS, 4>(weights, values + i * 4, dim * 4, begin, end, acc + i, dim, decay, keep);
    for (; i < dim; i += 32)
        weigh_pairs<ROWS, 2>(weights, values + i * 4, dim * 4, begin, end, acc + i, dim, decay, keep);
}

// One row over the positions of `range`, of whose first and last pair it may see one half.
static void weigh_alone(const bf16* weights, const char* values, Range range, float* acc, int64_t dim, float decay) {
    const __m512i all = _mm512_set1_epi32(-1), none_yet = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i none_after = _mm512_set1_epi32(0xffff);
    int64_t t = range.begin / 2;
    const int64_t end = range.end / 2;
    if (range.begin % 2 != 0) {
        weigh_all<1>(weights, values, t, t + 1, acc, dim, &decay, none_yet);
        ++t, decay = 1.0f;
    }
    if (t < end) {
        weigh_all<1>(weights, values, t, end, acc, dim, &decay, all);
        decay = 1.0f;
    }
    if (range.end % 2 != 0 && range.end > range.begin && t <= end)
        weigh_all<1>(weights, values, end, end + 1, acc, dim, &decay, none_after);
}

// What the rows of one KV head keep from tile to tile.
struct PairRows {
    const bf16* queries;  // [rows][dim]
    float* acc;           // [rows][dim]
    float* totals;        // [rows][16]: a total is the sum over its lanes
    float* peaks;         // [rows]
};

// A tile of one head: where its rows lie, and room to lay it out anew.
struct HeadTile {
    const bf16* const* keys;
    const bf16* const* values;
    int64_t offset;  // of the head in a row
    int64_t head_dim, dim;
    char* packed_keys;    // [dim / 2][TILE][2]
    char* packed_values;  // [TILE / 2][dim][2]
    Fetch fetch;          // what is needed next

    void pack_keys() {
        Fetch ahead = fetch;  // a copy of its own stays in registers, here and below
        __m512i pairs[16];
        for (int64_t i = 0; i < dim; i += 32) {
            for (int64_t t = 0; t < TILE; t += 16) {
                turn_keys(keys + t, offset + i, there_of(i, head_dim), pairs);
                for (int64_t p = 0; p < 16; ++p)
                    _mm512_store_si512(packed_keys + (i / 2 + p) * TILE * 4 + t * 4, pairs[p]);
                ahead.some<false>();
                ahead.some<false>();
            }
        }
        fetch = ahead;
    }

    void pack_values() {
        Fetch ahead = fetch;
        __m512i low, high;
        for (int64_t t = 0; t < TILE; t += 2) {
            for (int64_t i = 0; i < dim; i += 32) {
                pair_values(values[t] + offset + i, values[t + 1] + offset + i, there_of(i, head_dim), low, high);
                _mm512_store_si512(packed_values + t * dim * 2 + i * 4, low);
                _mm512_store_si512(packed_values + t * dim * 2 + i * 4 + 64, high);
                if (t % 8 == 0) ahead.some<false>();
            }
        }
        fetch = ahead;
    }
};

// Not inline: a cap is rare, and its code would take the registers of scores.
__attribute__((noinline)) static __m512 capped(__m512 score, float cap) { return soft_cap(score, cap); }

template <int ROWS, int VECTORS>
static QUIRE_INLINE void finish_scores(__m512 (*scores)[PARTS], float scale, float cap) {
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) {
            scores[r][v] = _mm512_mul_ps(scores[r][v], _mm512_set1_ps(scale));
        }
    }
    if (cap > 0.0f) {
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
            QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) scores[r][v] = capped(scores[r][v], cap);
        }
    }
}

// Lane r: the largest lane of vectors[r].
template <int ROWS>
static QUIRE_INLINE __m512 highest_lanes(const __m512* vectors) {
    static_assert(ROWS <= 8, "two groups of four rows");
    __m512 pairs[4], fours[2];  // of rows, side by side; what stands in for rows that are not there is not used
    QUIRE_UNROLL for (int i = 0; i < 4; ++i) {
        const __m512 a = vectors[2 * i < ROWS ? 2 * i : 0], b = vectors[2 * i + 1 < ROWS ? 2 * i + 1 : 0];
        pairs[i] = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    QUIRE_UNROLL for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 halves = _mm512_max_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x44),
                                        _mm512_shuffle_f32x4(fours[0], fours[1], 0xee));
    const __m512 all = _mm512_max_ps(halves, _mm512_shuffle_f32x4(halves, halves, 0xb1));
    return _mm512_shuffle_f32x4(all, all, 0x08);  // the second group of four behind the first
}

// The online softmax of ROWS rows over the first 16 * VECTORS scores of a tile, which become weights. Returns in
// `decay` by how much what was summed so far decays.
template <int ROWS, int VECTORS>
static QUIRE_INLINE void soften_rows(const PairRows& rows, __m512 (*scores)[PARTS], bf16* weights, float* decay) {
    __m512 highest[ROWS];
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        highest[r] = _mm512_max_ps(scores[r][0], scores[r][1]);
        if (VECTORS == 4) highest[r] = _mm512_max_ps(highest[r], _mm512_max_ps(scores[r][2], scores[r][3]));
    }
    constexpr __mmask16 there = (1 << ROWS) - 1;  // a row a lane
    const __m512 before = _mm512_maskz_loadu_ps(there, rows.peaks);
    const __m512 now = _mm512_max_ps(highest_lanes<ROWS>(highest), before);  // in this order a NaN is passed over
    // Nothing but -inf so far: weights are 0, and no NaN.
    const __m512 base = _mm512_mask_mov_ps(now, _mm512_cmpeq_ps_mask(now, _mm512_set1_ps(NONE)), _mm512_setzero_ps());
    alignas(64) float bases[16];
    _mm512_mask_storeu_ps(rows.peaks, there, now);
    _mm512_store_ps(bases, base);
    _mm512_store_ps(decay, power_of_two(_mm512_sub_ps(before, base)));
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        __m512* score = scores[r];
        const __m512 from = _mm512_set1_ps(bases[r]);
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) score[v] = power_of_two(_mm512_sub_ps(score[v], from));
        __m512 sum = _mm512_add_ps(score[0], score[1]);
        _mm512_store_si512(weights + r * TILE, round_pair(score[0], score[1]));
        if (VECTORS == 4) {
            sum = _mm512_add_ps(sum, _mm512_add_ps(score[2], score[3]));
            _mm512_store_si512(weights + r * TILE + 32, round_pair(score[2], score[3]));
        }
        float* total = rows.totals + r * 16;
        _mm512_storeu_ps(total, _mm512_fmadd_ps(_mm512_loadu_ps(total), _mm512_set1_ps(decay[r]), sum));
    }
}

// ROWS rows through the first 16 * VECTORS keys of a packed tile: no row sees more. The first rows also fetch what is
// needed next.
template <int ROWS, int VECTORS>
static void run_rows(const PairRows& rows, const Range* seen, HeadTile& tile, float scale, float cap) {
    const int64_t dim = tile.dim;
    __m512 scores[ROWS][PARTS];
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) scores[r][v] = _mm512_setzero_ps();
    }
    tile.fetch.steps(dim / 4);
    for (int64_t d = 0; d < dim; d += 2) {
        __m512i key[VECTORS];
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v)
            key[v] = _mm512_load_si512(tile.packed_keys + d * TILE * 2 + v * 64);
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512i query = broadcast_pair(rows.queries + r * dim + d);
            QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) scores[r][v] = dot(scores[r][v], key[v], query);
        }
    }
    finish_scores<ROWS, VECTORS>(scores, scale, cap);
    Range common{0, TILE};
    for (int r = 0; r < ROWS; ++r)
        common = {std::max(common.begin, seen[r].begin), std::min(common.end, seen[r].end)};
    const bool whole = common.begin == 0 && common.end == TILE;
    if (!whole) {
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
            const uint64_t ends = seen[r].end == TILE ? ~uint64_t(0) : (uint64_t(1) << seen[r].end) - 1;
            const uint64_t sees = ends & ~uint64_t(0) << seen[r].begin;
            QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v)
                scores[r][v] = _mm512_mask_mov_ps(_mm512_set1_ps(NONE), static_cast<__mmask16>(sees >> (16 * v)),
                                                  scores[r][v]);
        }
    }
    alignas(64) bf16 weights[ROWS * TILE];
    alignas(64) float decay[16];
    soften_rows<ROWS, VECTORS>(rows, scores, weights, decay);
    const __m512i all = _mm512_set1_epi32(-1);
    const char* values = tile.packed_values;
    tile.fetch.steps(dim / 4);
    if (whole) return weigh_all<ROWS>(weights, values, 0, TILE / 2, rows.acc, dim, decay, all);
    // A value that a row does not see never meets it, not even with weight 0: it may be garbage.
    const Range together{(common.begin + 1) / 2 * 2, common.end / 2 * 2};
    const bool any = together.begin < together.end;
    const float one = 1.0f;
    for (int r = 0; r < ROWS; ++r) {
        const Range first{seen[r].begin, any ? together.begin : seen[r].end};
        if (first.begin >= first.end) continue;
        weigh_alone(weights + r * TILE, values, first, rows.acc + r * dim, dim, decay[r]);
        decay[r] = one;
    }
    if (!any) return;
    weigh_all<ROWS>(weights, values, together.begin / 2, together.end / 2, rows.acc, dim, decay, all);
    for (int r = 0; r < ROWS; ++r)
        if (together.end < seen[r].end)
            weigh_alone(weights + r * TILE, values, {together.end, seen[r].end}, rows.acc + r * dim, dim, one);
}

template <int ROWS>
static void run_rows(const PairRows& rows, const Range* seen, HeadTile& tile, float scale, float cap) {
    int64_t end = 0;
    for (int r = 0; r < ROWS; ++r) end = std::max(end, seen[r].end);
    if (end <= TILE / 2) return run_rows<ROWS, PARTS / 2>(rows, seen, tile, scale, cap);
    run_rows<ROWS, PARTS>(rows, seen, tile, scale, cap);
}

// acc = acc * decay + weights @ values for 16 * VECTORS elements of a whole tile, from the rows of the values; there[i]
// says which of the i-th 32 a head has. Not inline: the compiler would keep the caller's pointers in vector registers,
// and then the values in memory, which costs half of the speed.
template <int ROWS, int VECTORS>
__attribute__((noinline)) static void weigh_rows(const bf16* weights, const bf16* const* values, int64_t offset,
                                                 const __mmask32* there, float* acc, int64_t dim, const float* decay,
                                                 Fetch& fetch) {
    __m512 sums[ROWS][VECTORS];
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) {
            sums[r][v] = _mm512_mul_ps(_mm512_loadu_ps(acc + r * dim + v * 16), _mm512_set1_ps(decay[r]));
        }
    }
    Fetch ahead = fetch;
    for (int64_t t = 0; t < TILE; t += 2) {
        if (t % (16 / VECTORS) == 0) ahead.some<true>();
        __m512i value[VECTORS];
        QUIRE_UNROLL for (int v = 0; v < VECTORS; v += 2)
            pair_values(values[t] + offset + v * 16, values[t + 1] + offset + v * 16, there[v / 2], value[v],
                        value[v + 1]);
        QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
            const __m512i weight = broadcast_pair(weights + r * TILE + t);
            QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) sums[r][v] = dot(sums[r][v], value[v], weight);
        }
    }
    fetch = ahead;
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(acc + r * dim + v * 16, sums[r][v]);
    }
}

// ROWS rows through a tile that all of them see whole: what run_rows() computes, in the same order. So few rows do not
// repay laying out the tile in memory. What is needed next is fetched evenly over the time that this takes.
template <int ROWS>
static void run_few(const PairRows& rows, HeadTile& tile, float scale, float cap) {
    const int64_t dim = tile.dim, head_dim = tile.head_dim;
    __m512 scores[ROWS][PARTS];
    QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
        QUIRE_UNROLL for (int v = 0; v < PARTS; ++v) scores[r][v] = _mm512_setzero_ps();
    }
    Fetch ahead = tile.fetch;
    alignas(64) __m512i keys[PARTS][16];
    for (int64_t d = 0; d < dim; d += 32) {
        for (int v = 0; v < PARTS; ++v) {
            turn_keys(tile.keys + v * 16, tile.offset + d, there_of(d, head_dim), keys[v]);
            for (int i = 0; i < 2; ++i) ahead.some<true>();
        }
        const bf16* query = rows.queries + d;
        int64_t step = dim;
        asm("" : "+r"(query), "+r"(step));  // no code: what is unrolled below would else have a pointer for each query
        QUIRE_UNROLL for (int p = 0; p < 16; ++p) {
            ahead.some<true>();
            QUIRE_UNROLL for (int r = 0; r < ROWS; ++r) {
                const __m512i pair = broadcast_pair(query + r * step + 2 * p);
                QUIRE_UNROLL for (int v = 0; v < PARTS; ++v) scores[r][v] = dot(scores[r][v], keys[v][p], pair);
            }
        }
    }
    tile.fetch = ahead;
    finish_scores<ROWS, PARTS>(scores, scale, cap);
    alignas(64) bf16 weights[ROWS * TILE];
    alignas(64) float decay[16];
    soften_rows<ROWS, PARTS>(rows, scores, weights, decay);
    for (int64_t i = 0; i < dim; i += 64) {
        const int64_t offset = tile.offset + i;
        if (i + 64 <= dim) {
            const __mmask32 there[] = {there_of(i, head_dim), there_of(i + 32, head_dim)};
            weigh_rows<ROWS, 4>(weights, tile.values, offset, there, rows.acc + i, dim, decay, tile.fetch);
        } else {
            const __mmask32 there = there_of(i, head_dim);
            weigh_rows<ROWS, 2>(weights, tile.values, offset, &there, rows.acc + i, dim, decay, tile.fetch);
        }
    }
}

// `count` rows, of which row r sees seen(r) of the tile. What a row sees begins and ends no earlier than for the last.
template <class Seen>
static void run_head_tile(const PairRows& rows, int64_t count, const Seen& seen, HeadTile& tile, float scale,
                          float cap) {
    if (count <= PAIR_ROWS && seen(0).end == TILE && seen(count - 1).begin == 0) {
        switch (count) {
            case 1: return run_few<1>(rows, tile, scale, cap);
            case 2: return run_few<2>(rows, tile, scale, cap);
            case 3: return run_few<3>(rows, tile, scale, cap);
            case 4: return run_few<4>(rows, tile, scale, cap);
            case 5: return run_few<5>(rows, tile, scale, cap);
            default: return run_few<6>(rows, tile, scale, cap);
        }
    }
    tile.pack_keys();
    tile.pack_values();
    const int64_t groups = (count + PAIR_ROWS - 1) / PAIR_ROWS, dim = tile.dim;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = g * count / groups, size = (g + 1) * count / groups - row;
        Range ranges[PAIR_ROWS];
        for (int64_t r = 0; r < size; ++r) ranges[r] = seen(row + r);
        const PairRows some{rows.queries + row * dim, rows.acc + row * dim, rows.totals + row * 16, rows.peaks + row};
        switch (size) {
            case 1: run_rows<1>(some, ranges, tile, scale, cap); break;
            case 2: run_rows<2>(some, ranges, tile, scale, cap); break;
            case 3: run_rows<3>(some, ranges, tile, scale, cap); break;
            case 4: run_rows<4>(some, ranges, tile, scale, cap); break;
            case 5: run_rows<5>(some, ranges, tile, scale, cap); break;
            default: run_rows<6>(some, ranges, tile, scale, cap); break;
        }
    }
}

}  // namespace
}  // namespace quire

#endif
