// Paged causal attention: decode and chunked prefill through one path.
//
// Keys are taken in tiles of TILE positions and in splits of SPLIT positions, both counted from the start of
// the sequence. A row runs an online softmax over the tiles of a split that it sees, ascending, and merges its
// splits, ascending. So the bits of a row depend on its query and on the keys and values that it sees; how rows
// are grouped into items, which thread runs an item and where the blocks lie changes only speed.

#include <algorithm>
#include <cmath>
#include <vector>

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
constexpr int64_t ITEM_ROWS = 96;       // query rows of an item, for a KV head: enough to repay widening its tiles
constexpr int64_t DIRECT_ROWS = 6;      // up to here widening in registers is cheaper than a widened copy
constexpr int64_t WORTH_THREADS = 400000;  // multiply-adds

constexpr float NONE = -__builtin_inff();

struct Call {
    int64_t num_requests, num_heads, num_kv_heads, head_dim, block_size;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    int64_t table_stride;
    int64_t q_stride, block_stride, value_offset;  // in elements
    int64_t window;                                // 0: none
    float scale;

    int64_t group() const { return num_heads / num_kv_heads; }
    int64_t padded_dim() const { return (head_dim + UNIT - 1) / UNIT * UNIT; }
    int64_t first_visible(int64_t position) const {
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
};

// Some neighbouring queries of one request for some KV heads, over one split or over all.
struct Item {
    int64_t request, first_query, num_queries, first_head, num_heads;
    int64_t first_position;      // of first_query
    int64_t begin, end;          // positions to visit
    float* partial;              // where to leave the unmerged result of one split, or null: finish the rows
    int64_t cost;
};

struct Range {
    int64_t begin, end;
};

// ---- one tile -----------------------------------------------------------------------------------------------

// Four sums over all lanes at once; the order of additions is fixed by LANES alone.
static inline void sum4(vf a, vf b, vf c, vf d, float* out) {
#if defined(__AVX512F__)
    const vf ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                  __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const vf cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                  __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const vf all = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif defined(__AVX2__)
    const vf ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                  __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const vf cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                  __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const vf all = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                   __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
#else
    const vf ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const vf cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const vf all = __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#endif
    typedef float v4 __attribute__((vector_size(16)));
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
template <int ROWS, class S, int DU, bool FETCH>
static inline void score_four(const float* q, const S* const* keys, const S* const* next, int64_t offset,
                              int64_t num_units, float* scores) {
    const int64_t units = DU ? DU : num_units, dim = units * UNIT;
    vf sums[ROWS][4] = {};
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
        for (int t = 0; t < 4; ++t) fetch(next[t] + offset, dim);
    for (int r = 0; r < ROWS; ++r) sum4(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * TILE);
}

// acc = acc * decay + weights @ values, over the tokens of `range` one after the other, for UNITS units.
template <int ROWS, int UNITS, class S, bool FETCH>
static inline void weigh_units(const float* weights, const S* const* values, const S* const* next, int64_t offset,
                               Range range, float* acc, int64_t dim, const float* decay) {
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
            const vf b = load_part<1>(value + u * UNIT);
            for (int r = 0; r < ROWS; ++r) sums[r][2 * u + 1] = fma(weight[r], b, sums[r][2 * u + 1]);
        }
        if (FETCH) fetch(next[t] + offset, UNITS * UNIT);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 2 * UNITS; ++i) store(acc + r * dim + i * LANES, sums[r][i]);
}

template <int ROWS, class S, int DU, bool FETCH>
static inline void weigh(const float* weights, const S* const* values, const S* const* next, int64_t offset,
                         Range range, int64_t num_units, float* acc, const float* decay) {
    constexpr int64_t STEP = ROWS == 1 ? 4 : 2;  // enough independent sums to hide the latency of an fma
    const int64_t units = DU ? DU : num_units, dim = units * UNIT;
    int64_t u = 0;
    for (; u + STEP <= units; u += STEP)
        weigh_units<ROWS, STEP, S, FETCH>(weights, values, next, offset + u * UNIT, range, acc + u * UNIT, dim,
                                          decay);
    if (DU == 0 || DU % STEP != 0)
        for (; u < units; ++u)
            weigh_units<ROWS, 1, S, FETCH>(weights, values, next, offset + u * UNIT, range, acc + u * UNIT, dim, decay);
}

// The online softmax of one row over one tile: scores become weights. Not a template, so that there is one
// compiled form of it. Returns the factor by which what was summed so far decays.
__attribute__((noinline)) static float soften(float* scores, float* peak, float* total) {
    vf highest = load(scores);
    for (int64_t t = LANES; t < TILE; t += LANES) highest = max(highest, load(scores + t));
    const float before = *peak, tile_peak = max(highest);
    const float now = before < tile_peak ? tile_peak : before;
    const vf base = splat(now == NONE ? 0.0f : now);  // nothing but -inf so far: weights 0, and no NaN
    vf sums{};
    for (int64_t t = 0; t < TILE; t += LANES) {
        const vf weight = exp2(load(scores + t) - base);
        store(scores + t, weight);
        sums += weight;
    }
    const float decay = before == now ? 1.0f : exp2(before - base[0]);
    *total = fma(splat(*total), splat(decay), splat(sum(sums)))[0];
    *peak = now;
    return decay;
}

// ---- one item -----------------------------------------------------------------------------------------------

static float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if (memory.size() < static_cast<size_t>(floats) + 16) memory.resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

template <class T>
static void widen_row(const T* from, float* to, int64_t dim, float scale) {
    for (int64_t i = 0; i < dim; i += UNIT) {
        T padded[UNIT] = {};
        const T* unit = from + i;
        if (dim - i < UNIT) {
            std::memcpy(padded, unit, (dim - i) * sizeof(T));
            unit = padded;
        }
        store(to + i, load_part<0>(unit) * splat(scale));
        store(to + i + LANES, load_part<1>(unit) * splat(scale));
    }
}

template <class T>
static void write_row(const float* from, T* to, int64_t dim, float factor) {
    for (int64_t i = 0; i < dim; i += UNIT) {
        const vf a = load(from + i) * splat(factor), b = load(from + i + LANES) * splat(factor);
        if (dim - i >= UNIT) {
            store_unit(to + i, a, b);
        } else {
            T padded[UNIT];
            store_unit(padded, a, b);
            std::memcpy(to + i, padded, (dim - i) * sizeof(T));
        }
    }
}

// (peak, total, acc) of a row, with those of its next split merged in. One compiled form, as soften().
__attribute__((noinline)) static void merge(float* peak, float* total, float* acc, float peak2, float total2,
                                            const float* acc2, int64_t dim) {
    const float now = *peak < peak2 ? peak2 : *peak, base = now == NONE ? 0.0f : now;
    const vf a = exp2(splat(*peak - base)), b = exp2(splat(peak2 - base));
    *total = fma(splat(total2), b, splat(*total) * a)[0];
    for (int64_t i = 0; i < dim; i += LANES) store(acc + i, fma(load(acc2 + i), b, load(acc + i) * a));
    *peak = now;
}

// Where the keys of a tile lie (index 0..TILE-1; outside `visible` the nearest visible one stands in).
template <class T>
static void locate(const Call& call, const T* kv, int64_t request, int64_t tile_begin, Range visible,
                   const T** keys) {
    const int32_t* table = call.block_tables + request * call.table_stride;
    const int64_t token_stride = call.num_kv_heads * call.head_dim;
    for (int64_t t = visible.begin; t < visible.end;) {
        const int64_t position = tile_begin + t, in_block = position % call.block_size;
        const int64_t end = std::min(visible.end, t + call.block_size - in_block);
        const T* key = kv + table[position / call.block_size] * call.block_stride + in_block * token_stride;
        for (; t < end; ++t, key += token_stride) keys[t] = key;
    }
    for (int64_t t = 0; t < visible.begin; ++t) keys[t] = keys[visible.begin];
    for (int64_t t = visible.end; t < TILE; ++t) keys[t] = keys[visible.end - 1];
}

// The rows of one KV head through one tile. Row `r` stands at position `first_position + r / group`.
template <class S, int DU, bool FETCH>
static void run_tile(const Call& call, int64_t num_rows, int64_t first_position, int64_t tile_begin,
                     const S* const* keys, const S* const* values, const S* const* next_keys,
                     const S* const* next_values, int64_t offset, const float* q, float* scores, float* acc,
                     float* peaks, float* totals) {
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
    score_four<ROWS, S, DU, FETCH>(query, keys + t, next_keys + t, offset, units, scores + t)
        for (int64_t t = begin; t < end; t += 4) QUIRE_ROWS(QUIRE_SCORE)

        float decay[MAX_ROWS];
        for (int r = 0; r < rows; ++r) {
            float* row_scores = scores + r * TILE;
            std::fill(row_scores, row_scores + seen[r].begin, NONE);
            std::fill(row_scores + seen[r].end, row_scores + TILE, NONE);
            decay[r] = soften(row_scores, peaks + row + r, totals + row + r);
        }

        // A value that a row does not see never meets it, not even with weight 0: it may be garbage.
        const bool together = common.begin < common.end;
        const float keep = 1.0f;
        for (int r = 0; r < rows; ++r) {
            const Range before{seen[r].begin, together ? common.begin : seen[r].end};
            if (before.begin < before.end) {
                weigh<1, S, DU, false>(scores + r * TILE, values, values, offset, before, units, sums + r * dim,
                                       decay + r);
                decay[r] = 1.0f;
            }
        }
        if (together) {
#define QUIRE_WEIGH(ROWS) \
    weigh<ROWS, S, DU, FETCH>(scores, values, next_values, offset, common, units, sums, decay)
            QUIRE_ROWS(QUIRE_WEIGH)
            for (int r = 0; r < rows; ++r)
                if (common.end < seen[r].end)
                    weigh<1, S, DU, false>(scores + r * TILE, values, values, offset, {common.end, seen[r].end},
                                           units, sums + r * dim, &keep);
        }
        row += rows;
    }
}

template <class T, int DU>
static void run_item(const Call& call, const Item& item, const T* q, const T* kv, T* out) {
    const int64_t dim = DU ? DU * UNIT : call.padded_dim(), group = call.group();
    const int64_t head_rows = item.num_queries * group, rows = head_rows * item.num_heads;
    const bool direct = head_rows <= DIRECT_ROWS && dim == call.head_dim;

    float* queries = scratch(rows * (3 * dim + 4) + (MAX_ROWS + 2 * dim) * TILE);
    float* acc = queries + rows * dim;
    float* merged = acc + rows * dim;
    float* scores = merged + rows * dim;
    float* wide_keys = scores + MAX_ROWS * TILE;
    float* wide_values = wide_keys + TILE * dim;
    float* peaks = wide_values + TILE * dim;
    float* totals = peaks + rows;
    float* merged_peaks = totals + rows;
    float* merged_totals = merged_peaks + rows;

    const int64_t first_row = call.query_start[item.request] + item.first_query;
    const auto place = [&](int64_t row) {  // of an item's row in a row of q and of the output
        const int64_t head = item.first_head + row / head_rows;
        return (head * group + row % group) * call.head_dim;
    };
    const auto query_of = [&](int64_t row) { return row % head_rows / group; };
    const float scale = call.scale * 1.44269504088896341f;  // the softmax is taken in powers of two
    for (int64_t row = 0; row < rows; ++row)
        widen_row(q + (first_row + query_of(row)) * call.q_stride + place(row), queries + row * dim, call.head_dim,
                  scale);

    const T* keys[2][TILE];
    const T* values[2][TILE];
    const float* wide_key_rows[TILE];
    const float* wide_value_rows[TILE];
    for (int64_t t = 0; t < TILE; ++t) {
        wide_key_rows[t] = wide_keys + t * dim;
        wide_value_rows[t] = wide_values + t * dim;
    }
    const auto locate_tile = [&](int64_t tile, int which) {
        const Range visible{std::max<int64_t>(item.begin - tile, 0), std::min<int64_t>(item.end - tile, TILE)};
        locate(call, kv, item.request, tile, visible, keys[which]);
        for (int64_t t = 0; t < TILE; ++t) values[which][t] = keys[which][t] + call.value_offset;
        return visible;
    };

    int current = 0;
    const int64_t first_tile = item.begin / TILE * TILE;
    Range visible = locate_tile(first_tile, current);
    for (int64_t tile = first_tile; tile < item.end; tile += TILE) {
        if (tile == first_tile || tile % SPLIT == 0) {
            std::fill(acc, acc + rows * dim, 0.0f);
            std::fill(peaks, peaks + rows, NONE);
            std::fill(totals, totals + rows, 0.0f);
        }
        const int other = tile + TILE < item.end ? 1 - current : current;
        const Range next_visible = other == current ? visible : locate_tile(tile + TILE, other);
        // Queries that stand before this tile see nothing of it, nor do those whose window starts after it.
        const int64_t first_query = std::max<int64_t>(tile - item.first_position, 0);
        int64_t end_query = item.num_queries;
        if (call.window > 0)
            end_query = std::min<int64_t>(end_query, tile + TILE + call.window - 1 - item.first_position);
        for (int64_t h = 0; h < item.num_heads && first_query < end_query; ++h) {
            const int64_t skipped = first_query * group, row = h * head_rows + skipped;
            const int64_t count = (end_query - first_query) * group;
            const int64_t offset = (item.first_head + h) * call.head_dim;
            if (direct) {
                run_tile<T, DU, true>(call, count, item.first_position + first_query, tile, keys[current],
                                      values[current], keys[other], values[other], offset, queries + row * dim,
                                      scores, acc + row * dim, peaks + row, totals + row);
                continue;
            }
            for (int64_t t = visible.begin; t < visible.end; ++t) {
                widen_row(keys[current][t] + offset, wide_keys + t * dim, call.head_dim, 1.0f);
                widen_row(values[current][t] + offset, wide_values + t * dim, call.head_dim, 1.0f);
            }
            run_tile<float, DU, false>(call, count, item.first_position + first_query, tile, wide_key_rows,
                                       wide_value_rows, wide_key_rows, wide_value_rows, 0, queries + row * dim,
                                       scores, acc + row * dim, peaks + row, totals + row);
        }
        current = other;
        visible = next_visible;

        const bool ends_split = (tile + TILE) % SPLIT == 0 || tile + TILE >= item.end;
        if (!ends_split || item.partial) continue;
        const int64_t split = tile / SPLIT * SPLIT;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = item.first_position + query_of(row);
            const int64_t first = call.first_visible(position);
            if (position < split || first >= split + SPLIT) continue;
            if (first >= split) {
                merged_peaks[row] = peaks[row];
                merged_totals[row] = totals[row];
                std::memcpy(merged + row * dim, acc + row * dim, dim * sizeof(float));
            } else {
                merge(merged_peaks + row, merged_totals + row, merged + row * dim, peaks[row], totals[row],
                      acc + row * dim, dim);
            }
        }
    }
    if (item.partial) {
        std::memcpy(item.partial, acc, rows * dim * sizeof(float));
        std::memcpy(item.partial + rows * dim, peaks, rows * sizeof(float));
        std::memcpy(item.partial + rows * (dim + 1), totals, rows * sizeof(float));
        return;
    }
    for (int64_t row = 0; row < rows; ++row) {
        T* to = out + (first_row + query_of(row)) * call.num_heads * call.head_dim + place(row);
        write_row(merged + row * dim, to, call.head_dim, 1.0f / merged_totals[row]);
    }
}

// ---- all items ----------------------------------------------------------------------------------------------

// Cuts the step into items, those of one (request, queries, heads) and its splits next to each other.
static std::vector<Item> cut(const Call& call, bool by_split, bool by_head) {
    std::vector<Item> items;
    const int64_t group = call.group();
    for (int64_t r = 0; r < call.num_requests; ++r) {
        const int64_t num_queries = call.query_start[r + 1] - call.query_start[r];
        const int64_t start = call.context_lens[r] - num_queries;
        const int64_t step = std::max<int64_t>(1, ITEM_ROWS / group);
        for (int64_t first = 0; first < num_queries; first += step) {
            const int64_t count = std::min(step, num_queries - first);
            const int64_t position = start + first, end = position + count;
            const int64_t begin = call.first_visible(position);
            const int64_t heads = by_head || count * group > DIRECT_ROWS ? 1 : call.num_kv_heads;
            for (int64_t h = 0; h < call.num_kv_heads; h += heads) {
                Item item{r, first, count, h, heads, position, begin, end, nullptr, 0};
                if (!by_split) {
                    item.cost = (end - begin) * count * heads;
                    items.push_back(item);
                    continue;
                }
                for (int64_t split = begin / SPLIT * SPLIT; split < end; split += SPLIT) {
                    item.begin = std::max(begin, split);
                    item.end = std::min(end, split + SPLIT);
                    item.cost = (item.end - item.begin) * count * heads;
                    items.push_back(item);
                }
            }
        }
    }
    return items;
}

template <class T, int DU>
static void run_all(const Call& call, std::vector<Item>& items, const T* q, const T* kv, T* out, int num_threads) {
    const int64_t count = static_cast<int64_t>(items.size());
    if (num_threads <= 1) {
        for (const Item& item : items) run_item<T, DU>(call, item, q, kv, out);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
    for (int64_t i = 0; i < count; ++i) run_item<T, DU>(call, items[i], q, kv, out);
}

// Merges the splits of each row, ascending, and writes the row.
template <class T>
static void merge_splits(const Call& call, const std::vector<Item>& items, T* out) {
    const int64_t dim = call.padded_dim(), group = call.group();
    for (size_t i = 0; i < items.size();) {
        size_t end = i + 1;
        while (end < items.size() && items[end].begin > items[end - 1].begin && items[end].partial &&
               items[end].request == items[i].request && items[end].first_query == items[i].first_query &&
               items[end].first_head == items[i].first_head)
            ++end;
        const Item& item = items[i];
        const int64_t head_rows = item.num_queries * group, rows = head_rows * item.num_heads;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t query = row % head_rows / group, position = item.first_position + query;
            const int64_t head = (item.first_head + row / head_rows) * group + row % group;
            float *acc = nullptr, *peak = nullptr, *total = nullptr;
            for (size_t j = i; j < end; ++j) {
                const int64_t split = items[j].begin / SPLIT * SPLIT;
                if (position < split || call.first_visible(position) >= split + SPLIT) continue;
                float* split_acc = items[j].partial + row * dim;
                float* split_peak = items[j].partial + rows * dim + row;
                float* split_total = split_peak + rows;
                if (acc == nullptr) {
                    acc = split_acc, peak = split_peak, total = split_total;
                } else {
                    merge(peak, total, acc, *split_peak, *split_total, split_acc, dim);
                }
            }
            T* to = out + ((call.query_start[item.request] + item.first_query + query) * call.num_heads + head) *
                              call.head_dim;
            write_row(acc, to, call.head_dim, 1.0f / *total);
        }
        i = end;
    }
}

template <class T, int DU>
static void attend(const Call& call, const T* q, const T* kv, T* out, int num_threads) {
    int64_t work = 0, longest = 0;
    for (int64_t r = 0; r < call.num_requests; ++r) {
        const int64_t context = call.context_lens[r], count = call.query_start[r + 1] - call.query_start[r];
        const int64_t seen = call.window > 0 ? std::min(context, call.window + count) : context;
        work += 2 * count * seen * call.num_heads * call.head_dim;
        longest = std::max(longest, seen);
    }
    if (work < WORTH_THREADS) num_threads = 1;
    // Finer items only where there are too few to keep the threads busy; the bits are the same either way.
    std::vector<Item> items = cut(call, false, false);
    const size_t enough = 4 * static_cast<size_t>(num_threads);
    if (num_threads > 1 && items.size() < enough) items = cut(call, false, true);
    std::vector<float> partials;
    if (num_threads > 1 && items.size() < enough && longest > SPLIT) {
        items = cut(call, true, true);
        const int64_t floats = call.padded_dim() + 2, group = call.group();
        int64_t rows = 0;
        for (const Item& item : items) rows += item.num_queries * item.num_heads * group;
        partials.resize(rows * floats);
        float* partial = partials.data();
        for (Item& item : items) {
            item.partial = partial;
            partial += item.num_queries * item.num_heads * group * floats;
        }
    } else if (num_threads > 1) {  // longest first, so that the threads end together
        std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    }
    run_all<T, DU>(call, items, q, kv, out, num_threads);
    if (!partials.empty()) merge_splits(call, items, out);
}

template <class T>
static void attend(const Call& call, const void* q, const void* kv, void* out, int num_threads) {
    const T* queries = static_cast<const T*>(q);
    const T* cache = static_cast<const T*>(kv);
    T* to = static_cast<T*>(out);
    if (call.head_dim == 64) return attend<T, 64 / UNIT>(call, queries, cache, to, num_threads);
    if (call.head_dim == 128) return attend<T, 128 / UNIT>(call, queries, cache, to, num_threads);
    attend<T, 0>(call, queries, cache, to, num_threads);
}

}  // namespace
}  // namespace quire

// `dtype` is 0 for bfloat16, 1 for float16, 2 for float32. Strides are in elements: of a row of `q`, of a block
// of `kv`, and from a token's keys to its values. `window` 0 means that every earlier position is seen.
extern "C" void quire_attention(int dtype, const void* q, int64_t q_stride, const void* kv, int64_t block_stride,
                                int64_t value_offset, void* out, const int32_t* query_start,
                                const int32_t* context_lens, const int32_t* block_tables, int64_t table_stride,
                                int64_t num_requests, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                int64_t block_size, int64_t window, float scale, int num_threads) {
    using namespace quire;
    const Call call{num_requests, num_heads,    num_kv_heads, head_dim,     block_size,   query_start, context_lens,
                    block_tables, table_stride, q_stride,     block_stride, value_offset, window,      scale};
    if (dtype == 0) return attend<bf16>(call, q, kv, out, num_threads);
    if (dtype == 1) return attend<fp16>(call, q, kv, out, num_threads);
    attend<float>(call, q, kv, out, num_threads);
}
