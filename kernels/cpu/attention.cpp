// Paged causal attention: decode and chunked prefill through one path.
//
// Keys are taken in tiles of TILE positions and in splits of SPLIT positions, both counted from the start of
// the sequence. A row runs an online softmax over the tiles of a split that it sees, ascending, and merges its
// splits, ascending. So the bits of a row depend on its query and on the keys and values that it sees; how rows
// are grouped into items, which thread runs an item and where the blocks lie changes only speed.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention_bf16.h"
#include "attention_tile.h"
#include "functions.h"
#include "pool.h"
#include "scratch.h"

namespace quire {
namespace {

// Query rows of an item, for a KV head: enough to repay a tile that is widened, or laid out in pairs.
template <class T>
constexpr int64_t ITEM_ROWS = 96;
#if defined(QUIRE_BF16_ATTENTION)
template <>
constexpr int64_t ITEM_ROWS<bf16> = 192;
#endif
constexpr int64_t DIRECT_ROWS = 6;         // up to here widening in registers is cheaper than a widened copy
constexpr int64_t WORTH_THREADS = 400000;  // multiply-adds that repay a second thread
constexpr float LOG2_E = 1.44269504088896341f;  // the softmax is taken in powers of two, and so are scores

// Some neighboring queries of one request for some KV heads, over one split or over all.
struct Item {
    int64_t request, first_query, num_queries, first_head, num_heads;
    int64_t first_position;      // of first_query
    int64_t begin, end;          // positions to visit
    float* partial;              // where to leave the unmerged result of one split, or null: finish the rows
    int64_t cost;
    const float* state = nullptr;  // of its rows before `begin`, if other requests shared the way to there
};

// ---- one item -----------------------------------------------------------------------------------------------

static float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if (memory.size() < static_cast<size_t>(floats) + 16) memory.resize(floats + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

template <class T>
static inline void widen_row(const T* from, float* to, int64_t dim) {
    for (int64_t i = 0; i < dim; i += UNIT) {
        T padded[UNIT] = {};
        const T* unit = from + i;
        if (dim - i < UNIT) {
            std::memcpy(padded, unit, (dim - i) * sizeof(T));
            unit = padded;
        }
        store(to + i, load_part<0>(unit));
        store(to + i + LANES, load_part<1>(unit));
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

#if defined(QUIRE_BF16_ATTENTION)
static void write_row(const float* from, bf16* to, int64_t dim, float factor) {
    for (int64_t i = 0; i < dim; i += UNIT) {
        const vf a = load(from + i) * splat(factor), b = load(from + i + LANES) * splat(factor);
        const int64_t left = dim - i;
        const __mmask32 there = left >= UNIT ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
        _mm512_mask_storeu_epi16(to + i, there, in_order(round_pair(a, b)));
    }
}
#endif

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

// The rows of an item: those of each head after each other, its queries one by one, the heads of a group together.
struct ItemRows {
    const Call& call;
    const Item& item;
    int64_t group = call.group(), head_rows = item.num_queries * group, count = head_rows * item.num_heads;
    int64_t first = call.query_start[item.request] + item.first_query;

    int64_t query_of(int64_t row) const { return row % head_rows / group; }

    // In a row of q and of the output.
    int64_t place(int64_t row) const {
        const int64_t head = item.first_head + row / head_rows;
        return (head * group + row % group) * call.head_dim;
    }
};

// What an item's rows have come to: in the split that is computed, and in those before it.
struct Sums {
    float *acc, *peaks, *totals, *merged, *merged_peaks, *merged_totals;
};

// A row's split joins those before it; the first one starts the sum.
static inline void merge_row(const Sums& sums, int64_t row, int64_t dim, bool first) {
    if (first) {
        sums.merged_peaks[row] = sums.peaks[row];
        sums.merged_totals[row] = sums.totals[row];
        std::memcpy(sums.merged + row * dim, sums.acc + row * dim, dim * sizeof(float));
    } else {
        merge(sums.merged_peaks + row, sums.merged_totals + row, sums.merged + row * dim, sums.peaks[row],
              sums.totals[row], sums.acc + row * dim, dim);
    }
}

static void merge_split(const ItemRows& rows, const Sums& sums, int64_t split, int64_t dim) {
    for (int64_t row = 0; row < rows.count; ++row) {
        const int64_t position = rows.item.first_position + rows.query_of(row);
        const int64_t first = rows.call.first_visible(position);
        if (position < split || first >= split + SPLIT) continue;
        merge_row(sums, row, dim, first >= split);
    }
}

// The result of one split that others are still to be merged with, or the finished rows.
template <class T>
static void leave(const ItemRows& rows, const Sums& sums, int64_t dim, T* out) {
    const Call& call = rows.call;
    if (float* partial = rows.item.partial) {
        std::memcpy(partial, sums.acc, rows.count * dim * sizeof(float));
        std::memcpy(partial + rows.count * dim, sums.peaks, rows.count * sizeof(float));
        std::memcpy(partial + rows.count * (dim + 1), sums.totals, rows.count * sizeof(float));
        return;
    }
    for (int64_t row = 0; row < rows.count; ++row) {
        T* to = out + (rows.first + rows.query_of(row)) * call.num_heads * call.head_dim + rows.place(row);
        write_row(sums.merged + row * dim, to, call.head_dim, 1.0f / sums.merged_totals[row]);
    }
}

template <class T, int DU>
static void run_item(const Call& call, const Item& item, const T* q, const T* kv, T* out) {
    const int64_t dim = DU ? DU * UNIT : call.padded_dim(), head_dim = DU ? dim : call.head_dim;
    const ItemRows at{call, item};
    const int64_t group = at.group, head_rows = at.head_rows, rows = at.count;
    const bool direct = head_rows <= DIRECT_ROWS && dim == head_dim;

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

    const Sums sums{acc, peaks, totals, merged, merged_peaks, merged_totals};
    const vf scale = splat(call.scale * LOG2_E);
    for (int64_t row = 0; row < rows; ++row) {
        float* query = queries + row * dim;
        widen_row(q + (at.first + at.query_of(row)) * call.q_stride + at.place(row), query, head_dim);
        for (int64_t i = 0; i < dim; i += LANES) store(query + i, load(query + i) * scale);
    }

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
    if (direct)  // what comes later is fetched while something else is worked on
        for (int64_t t = visible.begin; t < visible.end; ++t) {
            fetch(keys[current][t] + item.first_head * head_dim, head_dim);
            fetch(values[current][t] + item.first_head * head_dim, head_dim);
        }
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
                // Meanwhile comes what is needed next: the next head of this tile, then the first of the next tile.
                const bool last = h + 1 == item.num_heads;
                const int from = last ? other : current;
                const int64_t ahead = last ? -h * head_dim : head_dim;
                run_tile<T, DU, true>(call, count, item.first_position + first_query, tile, keys[current],
                                      values[current], keys[from], values[from], offset, ahead,
                                      queries + row * dim, scores, acc + row * dim, peaks + row, totals + row);
                continue;
            }
            for (int64_t t = visible.begin; t < visible.end; ++t) {
                widen_row(keys[current][t] + offset, wide_keys + t * dim, head_dim);
                widen_row(values[current][t] + offset, wide_values + t * dim, head_dim);
            }
            run_tile<float, DU, false>(call, count, item.first_position + first_query, tile, wide_key_rows,
                                       wide_value_rows, wide_key_rows, wide_value_rows, 0, 0, queries + row * dim,
                                       scores, acc + row * dim, peaks + row, totals + row);
        }
        current = other;
        visible = next_visible;

        const bool ends_split = (tile + TILE) % SPLIT == 0 || tile + TILE >= item.end;
        if (!ends_split || item.partial) continue;
        merge_split(at, sums, tile / SPLIT * SPLIT, dim);
    }
    leave(at, sums, dim, out);
}

#if defined(QUIRE_BF16_ATTENTION)
// Room for the rows of an item that is computed in hardware, and for a tile laid out in pairs.
struct PairScratch {
    float *acc, *merged, *totals, *peaks, *merged_peaks, *merged_totals;
    bf16* queries;
    char *packed_keys, *packed_values;

    PairScratch(int64_t rows, int64_t dim) {
        const int64_t floats = (rows * (dim * 5 / 2 + 19) + 15) / 16 * 16;  // what is packed begins on a line
        acc = scratch(floats + TILE * dim);
        merged = acc + rows * dim;
        queries = reinterpret_cast<bf16*>(merged + rows * dim);
        totals = merged + rows * dim * 3 / 2;
        peaks = totals + rows * 16;
        merged_peaks = peaks + rows;
        merged_totals = merged_peaks + rows;
        packed_keys = reinterpret_cast<char*>(acc + floats);
        packed_values = packed_keys + TILE * dim * sizeof(bf16);
    }

    Sums sums() const { return {acc, peaks, totals, merged, merged_peaks, merged_totals}; }

    PairRows from(int64_t row, int64_t dim) const {
        return {queries + row * dim, acc + row * dim, totals + row * 16, peaks + row};
    }

    void take_query(const Call& call, int64_t row, int64_t dim, const bf16* q) {
        bf16* query = queries + row * dim;
        std::memcpy(query, q, call.head_dim * sizeof(bf16));
        std::fill(query + call.head_dim, query + dim, bf16{});
    }

    void start_split(int64_t rows, int64_t dim) {
        std::fill(acc, acc + rows * dim, 0.0f);
        std::fill(peaks, peaks + rows, NONE);
        std::fill(totals, totals + rows * 16, 0.0f);
    }

    void end_split(int64_t rows) {
        for (int64_t row = 0; row < rows; ++row) totals[row] = sum(load(totals + row * 16));
    }
};

// The tiles of some positions and heads of a request: start(tile), run(tile, index of the head, head), end(tile).
// Meanwhile the next tile is fetched, all heads of a position together: see Fetch. Behind the last tile comes the first
// one of `after`, if it is not null. `fetched`: so has this first tile.
template <class Start, class Run, class End>
static void walk_tiles(const Call& call, const bf16* kv, int64_t request, Range positions, int64_t first_head,
                       int64_t num_heads, const PairScratch& room, bool fetched, const Item* after, const Start& start,
                       const Run& run, const End& end) {
    const int64_t dim = call.padded_dim();
    const bf16* places[2][2 * TILE];  // of a tile's keys, then of its values
    const auto locate_tile = [&](int64_t tile, int which, int64_t of, Range within) {
        const Range visible{std::max<int64_t>(within.begin - tile, 0), std::min<int64_t>(within.end - tile, TILE)};
        locate(call, kv, of, tile, visible, places[which]);
        for (int64_t t = 0; t < TILE; ++t) places[which][TILE + t] = places[which][t] + call.value_offset;
    };
    int current = 0;
    const int64_t first_tile = positions.begin / TILE * TILE;
    locate_tile(first_tile, current, request, positions);
    for (int64_t t = 0; !fetched && t < 2 * TILE; ++t)
        fetch(places[current][t] + first_head * call.head_dim, num_heads * call.head_dim);
    for (int64_t tile = first_tile; tile < positions.end; tile += TILE) {
        start(tile);
        const int other = 1 - current;
        Fetch ahead;
        if (tile + TILE < positions.end) {
            locate_tile(tile + TILE, other, request, positions);
            ahead = {places[other], places[current], first_head * call.head_dim, num_heads * call.head_dim};
        } else if (after != nullptr) {
            locate_tile(after->begin / TILE * TILE, other, after->request, {after->begin, after->end});
            const bool same = after->first_head == first_head && after->num_heads == num_heads;
            ahead = {places[other], same ? places[current] : nullptr, after->first_head * call.head_dim,
                     after->num_heads * call.head_dim};
        }
        for (int64_t h = 0; h < num_heads; ++h) {
            HeadTile head{places[current], places[current] + TILE, (first_head + h) * call.head_dim, call.head_dim,
                          dim, room.packed_keys, room.packed_values, ahead};
            run(tile, h, head);
            ahead = head.fetch;
        }
        // A half-filled tile leaves lines that were not fetched, but the next item relies on its whole first tile.
        while (tile + TILE >= positions.end && !ahead.done()) ahead.some<false>();
        current = other;
        end(tile);
    }
}

// What is kept of each row that goes on alone after positions that it shared: of the split that it is in, and of those
// before. The rows of a request follow each other as in an item of all its heads.
static int64_t state_floats(int64_t dim) { return 2 * dim + 19; }

static void keep_state(const Sums& sums, int64_t row, int64_t dim, float* state) {
    std::memcpy(state, sums.acc + row * dim, dim * sizeof(float));
    std::memcpy(state + dim, sums.merged + row * dim, dim * sizeof(float));
    std::memcpy(state + 2 * dim, sums.totals + row * 16, 16 * sizeof(float));
    state[2 * dim + 16] = sums.peaks[row];
    state[2 * dim + 17] = sums.merged_peaks[row];
    state[2 * dim + 18] = sums.merged_totals[row];
}

static void restore_state(const float* state, int64_t row, int64_t dim, const Sums& sums) {
    std::memcpy(sums.acc + row * dim, state, dim * sizeof(float));
    std::memcpy(sums.merged + row * dim, state + dim, dim * sizeof(float));
    std::memcpy(sums.totals + row * 16, state + 2 * dim, 16 * sizeof(float));
    sums.peaks[row] = state[2 * dim + 16];
    sums.merged_peaks[row] = state[2 * dim + 17];
    sums.merged_totals[row] = state[2 * dim + 18];
}

// As run_item(), in hardware: see attention_bf16.h.
static void run_item_in_pairs(const Call& call, const Item& item, bool fetched, const Item* after, const bf16* q,
                              const bf16* kv, bf16* out) {
    const ItemRows at{call, item};
    const int64_t dim = call.padded_dim(), group = at.group, head_rows = at.head_rows, rows = at.count;
    PairScratch room(rows, dim);
    const Sums sums = room.sums();
    for (int64_t row = 0; row < rows; ++row)
        room.take_query(call, row, dim, q + (at.first + at.query_of(row)) * call.q_stride + at.place(row));
    const int64_t first_tile = item.begin / TILE * TILE;
    if (item.state != nullptr) {
        for (int64_t row = 0; row < rows; ++row) restore_state(item.state + row * state_floats(dim), row, dim, sums);
    } else {
        room.start_split(rows, dim);
    }
    walk_tiles(
        call, kv, item.request, {item.begin, item.end}, item.first_head, item.num_heads, room, fetched, after,
        [&](int64_t tile) {
            if (tile != first_tile && tile % SPLIT == 0) room.start_split(rows, dim);
        },
        [&](int64_t tile, int64_t h, HeadTile& head) {
            // Queries that stand before this tile see nothing of it, nor do those whose window starts after it.
            const int64_t first_query = std::max<int64_t>(tile - item.first_position, 0);
            int64_t end_query = item.num_queries;
            if (call.window > 0)
                end_query = std::min<int64_t>(end_query, tile + TILE + call.window - 1 - item.first_position);
            if (first_query >= end_query) return;
            const auto seen = [&](int64_t r) {
                const int64_t position = item.first_position + first_query + r / group;
                return Range{std::max<int64_t>(call.first_visible(position) - tile, 0),
                             std::min<int64_t>(position + 1 - tile, TILE)};
            };
            run_head_tile(room.from(h * head_rows + first_query * group, dim), (end_query - first_query) * group,
                          seen, head, call.scale * LOG2_E, call.soft_cap);
        },
        [&](int64_t tile) {
            if ((tile + TILE) % SPLIT != 0 && tile + TILE < item.end) return;
            room.end_split(rows);
            if (!item.partial) merge_split(at, sums, tile / SPLIT * SPLIT, dim);
        });
    leave(at, sums, dim, out);
}

// ---- positions that several requests share ------------------------------------------------------------------

constexpr int64_t FEW_QUERIES = 8;   // a request of more repays its tiles alone
constexpr int64_t SHARED_ROWS = 24;  // of a KV head: enough to repay a tile

// Requests of few queries whose tables begin with the same blocks, in `members`.
struct Sharing {
    int64_t first, end;  // of the members
    int64_t length;      // positions, whole tiles that every row sees
};

// Some of them, for one KV head.
struct SharedItem {
    int64_t first, end, length, head;
};

// Whole tiles of positions at the start of two requests that lie in the same blocks and that all their queries see.
static int64_t shared_length(const Call& call, int64_t a, int64_t b) {
    const int32_t *left = call.block_tables + a * call.table_stride, *right = call.block_tables + b * call.table_stride;
    const auto start_of = [&](int64_t r) {
        return call.context_lens[r] - (call.query_start[r + 1] - call.query_start[r]);
    };
    const int64_t most = std::min(start_of(a), start_of(b)) / call.block_size;
    const int64_t blocks = std::mismatch(left, left + most, right).first - left;
    return blocks * call.block_size / TILE * TILE;
}

// Finds who shares; `members` are the requests of all sharings, one after the other.
static std::vector<Sharing> find_sharing(const Call& call, std::vector<int64_t>& members) {
    std::vector<Sharing> found;
    std::vector<int64_t> few;
    for (int64_t r = 0; r < call.num_requests; ++r) {
        const int64_t queries = call.query_start[r + 1] - call.query_start[r];
        if (0 < queries && queries <= FEW_QUERIES && call.context_lens[r] - queries >= TILE) few.push_back(r);
    }
    std::sort(few.begin(), few.end(), [&](int64_t a, int64_t b) {
        const int32_t *left = call.block_tables + a * call.table_stride,
                      *right = call.block_tables + b * call.table_stride;
        const int64_t size_a = call.context_lens[a] / call.block_size, size_b = call.context_lens[b] / call.block_size;
        return std::lexicographical_compare(left, left + size_a, right, right + size_b);
    });
    for (size_t i = 0; i + 1 < few.size();) {
        const int64_t length = shared_length(call, few[i], few[i + 1]);
        size_t end = i + 1;
        while (length > 0 && end < few.size() && shared_length(call, few[i], few[end]) >= length) ++end;
        if (end - i > 1) {
            const int64_t first = static_cast<int64_t>(members.size());
            members.insert(members.end(), few.begin() + i, few.begin() + end);
            found.push_back({first, static_cast<int64_t>(members.size()), length});
        }
        i = end;
    }
    return found;
}

// Leaves the state of each row where `states` has it for its request.
static void run_shared(const Call& call, const SharedItem& item, const std::vector<int64_t>& members, const bf16* q,
                       const bf16* kv, const std::vector<float*>& states) {
    const int64_t dim = call.padded_dim(), group = call.group();
    const auto queries_of = [&](int64_t r) { return call.query_start[r + 1] - call.query_start[r]; };
    int64_t rows = 0;
    for (int64_t m = item.first; m < item.end; ++m) rows += queries_of(members[m]) * group;
    PairScratch room(rows, dim);
    const Sums sums = room.sums();
    int64_t row = 0;
    for (int64_t m = item.first; m < item.end; ++m)
        for (int64_t query = 0; query < queries_of(members[m]); ++query)
            for (int64_t g = 0; g < group; ++g)
                room.take_query(call, row++, dim, q + (call.query_start[members[m]] + query) * call.q_stride +
                                                      (item.head * group + g) * call.head_dim);
    walk_tiles(
        call, kv, members[item.first], {0, item.length}, item.head, 1, room, false, nullptr,
        [&](int64_t tile) {
            if (tile % SPLIT == 0) room.start_split(rows, dim);
        },
        [&](int64_t, int64_t, HeadTile& head) {
            run_head_tile(room.from(0, dim), rows, [](int64_t) { return Range{0, TILE}; }, head,
                          call.scale * LOG2_E, call.soft_cap);
        },
        [&](int64_t tile) {
            if ((tile + TILE) % SPLIT != 0) return;
            room.end_split(rows);
            for (int64_t r = 0; r < rows; ++r) merge_row(sums, r, dim, tile < SPLIT);
            room.start_split(rows, dim);  // where a request goes on from here
        });
    row = 0;
    for (int64_t m = item.first; m < item.end; ++m) {
        const int64_t own = queries_of(members[m]) * group;
        float* state = states[members[m]] + item.head * own * state_floats(dim);
        for (int64_t r = 0; r < own; ++r) keep_state(sums, row++, dim, state + r * state_floats(dim));
    }
}

// Computes what requests share once for all of them, and has their items go on from there.
static void share(const Call& call, std::vector<Item>& items, const bf16* q, const bf16* kv, int num_threads) {
    if (call.window > 0) return;
    std::vector<int64_t> members;
    const std::vector<Sharing> sharings = find_sharing(call, members);
    if (sharings.empty()) return;
    static thread_local Scratch memory;
    const int64_t dim = call.padded_dim(), row_floats = state_floats(dim);
    int64_t rows = 0;
    for (const int64_t r : members) rows += (call.query_start[r + 1] - call.query_start[r]) * call.num_heads;
    float* next = memory.room<float>(rows * row_floats);
    std::vector<float*> states(call.num_requests, nullptr);
    std::vector<int64_t> lengths(call.num_requests, 0);
    std::vector<SharedItem> shared;
    const int64_t least = std::max<int64_t>(1, SHARED_ROWS / call.group());
    for (const Sharing& one : sharings) {
        for (int64_t m = one.first; m < one.end; ++m) {
            const int64_t r = members[m];
            states[r] = next, lengths[r] = one.length;
            next += (call.query_start[r + 1] - call.query_start[r]) * call.num_heads * row_floats;
        }
        const int64_t count = one.end - one.first;
        const int64_t enough = (4 * num_threads + call.num_kv_heads - 1) / call.num_kv_heads;
        const int64_t parts = std::max<int64_t>(1, std::min(count / least, enough));
        for (int64_t h = 0; h < call.num_kv_heads; ++h)
            for (int64_t i = 0; i < parts; ++i)
                shared.push_back({one.first + i * count / parts, one.first + (i + 1) * count / parts, one.length, h});
    }
    const int64_t count = static_cast<int64_t>(shared.size());
    parallel_for(count, count, num_threads, [&](int64_t i) { run_shared(call, shared[i], members, q, kv, states); });
    for (Item& item : items) {
        if (states[item.request] == nullptr) continue;
        // Of all queries of a head: an item of several heads has them all, see cut().
        const int64_t queries = call.query_start[item.request + 1] - call.query_start[item.request];
        item.state = states[item.request] + (item.first_head * queries + item.first_query) * call.group() * row_floats;
        item.cost -= lengths[item.request] * item.num_queries * item.num_heads;
        item.begin = lengths[item.request];
    }
}
#endif

// ---- all items ----------------------------------------------------------------------------------------------

// Cuts the step into items of up to `item_rows` rows, those of one (request, queries, heads) and its splits next to each other.
static std::vector<Item> cut(const Call& call, int64_t item_rows, bool by_split, bool by_head) {
    std::vector<Item> items;
    const int64_t group = call.group();
    for (int64_t r = 0; r < call.num_requests; ++r) {
        const int64_t num_queries = call.query_start[r + 1] - call.query_start[r];
        const int64_t start = call.context_lens[r] - num_queries;
        const int64_t step = std::max<int64_t>(1, item_rows / group);
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
    parallel_for(count, count, num_threads, [&](int64_t i) {
#if defined(QUIRE_BF16_ATTENTION)
        if constexpr (std::is_same_v<T, bf16>) {
            // Probably this thread's next one.
            const Item* after = i + num_threads < count ? &items[i + num_threads] : nullptr;
            run_item_in_pairs(call, items[i], i >= num_threads, after, q, kv, out);
            return;
        } else
#endif
        run_item<T, DU>(call, items[i], q, kv, out);
    });
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
    std::vector<Item> items = cut(call, ITEM_ROWS<T>, false, false);
    const size_t enough = 4 * static_cast<size_t>(num_threads);
    if (num_threads > 1 && items.size() < enough) items = cut(call, ITEM_ROWS<T>, false, true);
    std::vector<float> partials;
    if (num_threads > 1 && items.size() < enough && longest > SPLIT) {
        items = cut(call, ITEM_ROWS<T>, true, true);
        const int64_t floats = call.padded_dim() + 2, group = call.group();
        int64_t rows = 0;
        for (const Item& item : items) rows += item.num_queries * item.num_heads * group;
        partials.resize(rows * floats);
        float* partial = partials.data();
        for (Item& item : items) {
            item.partial = partial;
            partial += item.num_queries * item.num_heads * group * floats;
        }
    } else {
#if defined(QUIRE_BF16_ATTENTION)
        if constexpr (std::is_same_v<T, bf16>) share(call, items, q, kv, num_threads);
#endif
    }
    if (num_threads > 1 && partials.empty()) {  // longest first, so that the threads end together
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
    if (call.head_dim == 256) return attend<T, 256 / UNIT>(call, queries, cache, to, num_threads);
    attend<T, 0>(call, queries, cache, to, num_threads);
}

}  // namespace
}  // namespace quire

// `dtype` is 0 for bfloat16, 1 for float16, 2 for float32. Strides are in elements: of a row of `q`, of a block
// of `kv`, and from a token's keys to its values. `window` 0 means that every earlier position is seen, `soft_cap` 0
// that scores have no cap. Returns 1 where memory ran out, else 0.
extern "C" int quire_attention(int dtype, const void* q, int64_t q_stride, const void* kv, int64_t block_stride,
                               int64_t value_offset, void* out, const int32_t* query_start,
                               const int32_t* context_lens, const int32_t* block_tables, int64_t table_stride,
                               int64_t num_requests, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                               int64_t block_size, int64_t window, float scale, float soft_cap, int num_threads) {
    using namespace quire;
    const Call call{num_requests, num_heads,    num_kv_heads, head_dim,     block_size,   query_start,
                    context_lens, block_tables, table_stride, q_stride,     block_stride, value_offset,
                    window,       scale,        soft_cap * LOG2_E};
    return status_of([&] {
        if (dtype == 0) return attend<bf16>(call, q, kv, out, num_threads);
        if (dtype == 1) return attend<fp16>(call, q, kv, out, num_threads);
        attend<float>(call, q, kv, out, num_threads);
    });
}
