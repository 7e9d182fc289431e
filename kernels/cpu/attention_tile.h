// One tile of paged attention: scores, online softmax and weighted values of some rows of one KV head.
#pragma once

#include <algorithm>

#include "vec.h"

namespace quire {
namespace {

constexpr int64_t TILE = 64;
constexpr int64_t SPLIT = 1024;
static_assert(SPLIT % TILE == 0, "a split is whole tiles");

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MAX_ROWS = 4;  // 32 vector registers
#else
constexpr int MAX_ROWS = 3;
#endif
constexpr float NONE = -__builtin_inff();

// What quire_attention() was called with.
struct Call {
    int64_t num_requests, num_heads, num_kv_heads, head_dim, block_size;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t table_stride;
    int64_t q_stride, block_stride, value_offset;  // in elements
    int64_t window;                                // 0: none
    float scale;
    float soft_cap;  // of scores in powers of two; 0: none

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t padded_dim() const { return (head_dim + UNIT - 1) / UNIT * UNIT; }
    int64_t first_visible(int64_t position) const {
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
};

struct Range {
    int64_t begin, end;
};

// Four sums over all lanes at once; the order of additions is fixed by LANES alone.
static inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if QUIRE_LANES == 16
    const vf ab = QUIRE_SHUFFLE(vi, a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                  QUIRE_SHUFFLE(vi, a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const vf cd = QUIRE_SHUFFLE(vi, c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                  QUIRE_SHUFFLE(vi, c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const vf all = QUIRE_SHUFFLE(vi, ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   QUIRE_SHUFFLE(vi, ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif QUIRE_LANES == 8
    const vf ab = QUIRE_SHUFFLE(vi, a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                  QUIRE_SHUFFLE(vi, a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const vf cd = QUIRE_SHUFFLE(vi, c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                  QUIRE_SHUFFLE(vi, c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const vf all = QUIRE_SHUFFLE(vi, ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                   QUIRE_SHUFFLE(vi, ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
#else
    const vf ab = QUIRE_SHUFFLE(vi, a, b, 0, 4, 1, 5) + QUIRE_SHUFFLE(vi, a, b, 2, 6, 3, 7);
    const vf cd = QUIRE_SHUFFLE(vi, c, d, 0, 4, 1, 5) + QUIRE_SHUFFLE(vi, c, d, 2, 6, 3, 7);
    const vf all = QUIRE_SHUFFLE(vi, ab, cd, 0, 1, 4, 5) + QUIRE_SHUFFLE(vi, ab, cd, 2, 3, 6, 7);
#endif
    v4 quarter[LANES / 4];
    std::memcpy(quarter, &all, sizeof(all));
    for (int n = LANES / 8; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) quarter[i] += quarter[i + n];
    std::memcpy(out, quarter, sizeof(v4));
}

template <class S>
static inline void fetch(const S* p, int64_t elements) {
    const char* line = reinterpret_cast<const char*>(p);
    for (int64_t i = 0; i < elements * static_cast<int64_t>(sizeof(S)); i += 64) __builtin_prefetch(line + i, 0, 2);
}

// Scores of ROWS queries against four keys. `DU` is the number of units of a head, 0 if known at run time only.
// `next` and `ahead` say where what is needed next lies: it is fetched meanwhile.
template <int ROWS, class S, int DU, bool FETCH>
static inline void score_four(const float* q, const S* const* keys, const S* const* next, int64_t offset,
                              int64_t ahead, int64_t num_units, float* scores) {
    const int64_t units = DU ? DU : num_units, dim = units * UNIT;
    vf sums[ROWS][4] = {};
#pragma GCC unroll 1  // more would cost registers, and much time to compile
    for (int64_t u = 0; u < units; ++u) {
        vf query[ROWS];
        for (int r = 0; r < ROWS; ++r) query[r] = load(q + r * dim + u * UNIT);
        for (int t = 0; t < 4; ++t) {
            const vf key = load_part<0>(keys[t] + offset + u * UNIT);
            for (int r = 0; r < ROWS; ++r) sums[r][t] = fma(query[r], key, sums[r][t]);
        }
        for (int r = 0; r < ROWS; ++r) query[r] = load(q + r * dim + u * UNIT + LANES);
        for (int t = 0; t < 4; ++t) {
            const vf key = load_part<1>(keys[t] + offset + u * UNIT);
            for (int r = 0; r < ROWS; ++r) sums[r][t] = fma(query[r], key, sums[r][t]);
        }
    }
    if (FETCH)
        for (int t = 0; t < 4; ++t) fetch(next[t] + offset + ahead, dim);
    for (int r = 0; r < ROWS; ++r) sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * TILE);
}

// acc = acc * decay + weights @ values, over the tokens of `range` one after the other, for UNITS units.
template <int ROWS, int UNITS, class S, bool FETCH>
static inline void weigh_units(const float* weights, const S* const* values, const S* const* next, int64_t offset,
                               int64_t ahead, Range range, float* acc, int64_t dim, const float* decay) {
    vf sums[ROWS][2 * UNITS];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 2 * UNITS; ++i) sums[r][i] = load(acc + r * dim + i * LANES) * splat(decay[r]);
    for (int64_t t = range.begin; t < range.end; ++t) {
        const S* value = values[t] + offset;
        vf weight[ROWS];
        for (int r = 0; r < ROWS; ++r) weight[r] = splat(weights[r * TILE + t]);
        for (int u = 0; u < UNITS; ++u) {
            const vf a = load_part<0>(value + u * UNIT);
            for (int r = 0; r < ROWS; ++r) sums[r][2 * u] = fma(weight[r], a, sums[r][2 * u]);
            // No code: makes the compiler load again through the pointer rather than keep what it loaded. It has no
            // register to spare, and a sum that lives in memory costs a third of the speed.
            asm("" : "+r"(value));
            const vf b = load_part<1>(value + u * UNIT);
            for (int r = 0; r < ROWS; ++r) sums[r][2 * u + 1] = fma(weight[r], b, sums[r][2 * u + 1]);
        }
        if (FETCH) fetch(next[t] + offset + ahead, UNITS * UNIT);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 2 * UNITS; ++i) store(acc + r * dim + i * LANES, sums[r][i]);
}

template <int ROWS, class S, int DU, bool FETCH>
static inline void weigh(const float* weights, const S* const* values, const S* const* next, int64_t offset,
                         int64_t ahead, Range range, int64_t num_units, float* acc, const float* decay) {
    constexpr int64_t STEP = ROWS == 1 ? 4 : 2;  // enough independent sums to hide the latency of an fma
    const int64_t units = DU ? DU : num_units, dim = units * UNIT;
    int64_t u = 0;
    for (; u + STEP <= units; u += STEP)
        weigh_units<ROWS, STEP, S, FETCH>(weights, values, next, offset + u * UNIT, ahead, range, acc + u * UNIT, dim,
                                          decay);
    if (DU == 0 || DU % STEP != 0)
        for (; u < units; ++u)
            weigh_units<ROWS, 1, S, FETCH>(weights, values, next, offset + u * UNIT, ahead, range, acc + u * UNIT,
                                           dim, decay);
}

// The online softmax of one row over one tile: scores, capped if `cap` is not 0, become weights. Not a template, so
// that there is one compiled form of it. Returns the factor by which what was summed so far decays.
__attribute__((noinline)) static float soften(float* scores, Range seen, float cap, float* peak, float* total) {
    // Whole vectors; what is skipped or not seen has weight 0, which no sum notices.
    const int64_t begin = seen.begin / LANES * LANES, end = (seen.end + LANES - 1) / LANES * LANES;
    if (cap > 0.0f)
        for (int64_t t = begin; t < end; t += LANES) store(scores + t, soft_cap(load(scores + t), cap));
    for (int64_t t = begin; t < seen.begin; ++t) scores[t] = NONE;
    for (int64_t t = seen.end; t < end; ++t) scores[t] = NONE;
    vf highest = load(scores + begin);
    for (int64_t t = begin + LANES; t < end; t += LANES) highest = max(highest, load(scores + t));
    const float before = *peak, tile_peak = max(highest);
    const float now = before < tile_peak ? tile_peak : before;
    const vf base = splat(now == NONE ? 0.0f : now);  // nothing but -inf so far: weights 0, and no NaN
    vf sums{};
    for (int64_t t = begin; t < end; t += LANES) {
        const vf weight = exp2(load(scores + t) - base);
        store(scores + t, weight);
        sums += weight;
    }
    const float decay = before == now ? 1.0f : exp2(before - base[0]);
    *total = fma(splat(*total), splat(decay), splat(sum(sums)))[0];
    *peak = now;
    return decay;
}

// The rows of one KV head through one tile. Row `r` stands at position `first_position + r / group`.
template <class S, int DU, bool FETCH>
static void run_tile(const Call& call, int64_t num_rows, int64_t first_position, int64_t tile_begin,
                     const S* const* keys, const S* const* values, const S* const* next_keys,
                     const S* const* next_values, int64_t offset, int64_t ahead, const float* q, float* scores,
                     float* acc, float* peaks, float* totals) {
    const int64_t units = DU ? DU : call.padded_dim() / UNIT, dim = units * UNIT, group = call.group();
    const auto visible = [&](int64_t row) {
        const int64_t position = first_position + row / group;
        return Range{std::max<int64_t>(call.first_visible(position) - tile_begin, 0),
                     std::min<int64_t>(position + 1 - tile_begin, TILE)};
    };
    for (int64_t row = 0; row < num_rows;) {
        const int64_t left = num_rows - row;
        const int rows = static_cast<int>(left == MAX_ROWS + 1 ? MAX_ROWS - 1 : std::min<int64_t>(left, MAX_ROWS));
        Range seen[MAX_ROWS], common{0, TILE};
        for (int r = 0; r < rows; ++r) {
            seen[r] = visible(row + r);
            common = {std::max(common.begin, seen[r].begin), std::min(common.end, seen[r].end)};
        }
        const int64_t begin = seen[0].begin & ~int64_t(3), end = seen[rows - 1].end;
        const float* query = q + row * dim;
        float* sums = acc + row * dim;
#define QUIRE_ROWS(CALL)                \
    switch (rows) {                     \
        case 1: CALL(1); break;         \
        case 2: CALL(2); break;         \
        case 3: CALL(3); break;         \
        default: CALL(MAX_ROWS); break; \
    }
#define QUIRE_SCORE(ROWS) \
    score_four<ROWS, S, DU, FETCH>(query, keys + t, next_keys + t, offset, ahead, units, scores + t)
        for (int64_t t = begin; t < end; t += 4) QUIRE_ROWS(QUIRE_SCORE)

        float decay[MAX_ROWS];
        for (int r = 0; r < rows; ++r)
            decay[r] = soften(scores + r * TILE, seen[r], call.soft_cap, peaks + row + r, totals + row + r);

        // A value that a row does not see never meets it, not even with weight 0: it may be garbage.
        const bool together = common.begin < common.end;
        const float keep = 1.0f;
        for (int r = 0; r < rows; ++r) {
            const Range before{seen[r].begin, together ? common.begin : seen[r].end};
            if (before.begin < before.end) {
                weigh<1, S, DU, false>(scores + r * TILE, values, values, offset, 0, before, units, sums + r * dim,
                                       decay + r);
                decay[r] = 1.0f;
            }
        }
        if (together) {
#define QUIRE_WEIGH(ROWS) \
    weigh<ROWS, S, DU, FETCH>(scores, values, next_values, offset, ahead, common, units, sums, decay)
            QUIRE_ROWS(QUIRE_WEIGH)
            for (int r = 0; r < rows; ++r)
                if (common.end < seen[r].end)
                    weigh<1, S, DU, false>(scores + r * TILE, values, values, offset, 0, {common.end, seen[r].end},
                                           units, sums + r * dim, &keep);
        }
        row += rows;
    }
}

}  // namespace
}  // namespace quire
