// y = x W^T + b in bfloat16 on CPUs that multiply it in hardware.
//
// VDPBF16PS adds the products of two neighboring k to a float32 lane. Every element of y is one chain of it over the
// pairs of k, ascending, then the bias, then one rounding. Tiles and threads decide only who computes an element, so
// its bits depend on its row of x and its row of W alone. The instruction takes subnormal numbers as zero.
//
// Weights lie in panels of 32 columns, [N / 32][K / 2][32][2], zero-padded. A tile of up to 12 rows runs through a
// whole panel with all its sums in registers. With one tile that is as fast as memory. With more, they find the panel
// in the second-level cache, because the tiles of the panel before fetched it, a part each: in the last panel of a
// thread's share, the first one of its share of the next weight. Many rows are taken in blocks that stay in that cache,
// too.
#pragma once

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define QUIRE_BF16_PRODUCTS 1

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "gemm_vec.h"
#include "pool.h"

namespace quire_gemm {
namespace {

constexpr int kPairRows = 12;             // rows of a tile: 24 sums, two vectors of weights, one of x
constexpr int64_t kPairSteps = 4;         // pairs of k, unrolled
constexpr int64_t kPairBytes = 128;       // of a pair of k in a panel
constexpr int64_t kPairsAhead = 24;       // fetched ahead by a single tile
constexpr int64_t kPairBlock = 256 << 10;  // bytes of x that stay in the second-level cache,
constexpr int64_t kPairBlockTiles = 8;     // or so many tiles if that is more
constexpr int64_t kPairThreadWork = 1 << 17;  // multiply-adds that are worth a thread

QUIRE_INLINE __m512 dot(__m512 sum, __m512i pairs, __m512i x) {
  return _mm512_dpbf16_ps(sum, bit_cast<__m512bh>(pairs), bit_cast<__m512bh>(x));
}

QUIRE_INLINE __m512i round_pair(__m512 low, __m512 high) {
  return bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// A pair of k of one row in every lane.
QUIRE_INLINE __m512i broadcast_pair(const Bf16* x) {
  int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

struct PairTile {
  const char* panel;
  int64_t pairs;
  const Bf16* x;
  int64_t x_stride;
  const char* ahead;    // what to fetch meanwhile, if not the panel itself,
  int64_t ahead_lines;  // so many lines per kPairSteps
  const float* bias;    // of the panel's columns, or null
  Bf16* y;
  int64_t y_stride;
  __mmask32 columns;  // those that y has
};

// With `kStreams`, the tile fetches its own panel, a steady way ahead: bursts of fetches would take longer.
template <int kRows, bool kStreams>
void multiply_tile(const PairTile& tile) {
  __m512 sums[kRows][2];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const char *w = tile.panel, *ahead = tile.ahead;
  const Bf16* x = tile.x;
  const int64_t x_stride = tile.x_stride, lines = tile.ahead_lines;
  const auto step = [&](const char* wk, const Bf16* xk) __attribute__((always_inline)) {
    if (kStreams) {
      __builtin_prefetch(wk + kPairsAhead * kPairBytes, 0, 3);
      __builtin_prefetch(wk + kPairsAhead * kPairBytes + 64, 0, 3);
    }
    const __m512i low = _mm512_loadu_si512(wk), high = _mm512_loadu_si512(wk + 64);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512i pair = broadcast_pair(xk + r * x_stride);
      sums[r][0] = dot(sums[r][0], low, pair);
      sums[r][1] = dot(sums[r][1], high, pair);
    }
  };
  int64_t k = 0;
  for (; k + kPairSteps <= tile.pairs; k += kPairSteps, w += kPairSteps * kPairBytes, x += 2 * kPairSteps) {
    for (int64_t line = 0; !kStreams && line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 3);
    QUIRE_UNROLL for (int s = 0; s < kPairSteps; ++s) step(w + s * kPairBytes, x + 2 * s);
  }
  for (; k < tile.pairs; ++k, w += kPairBytes, x += 2) step(w, x);
  if (tile.bias != nullptr) {
    const __m512 low = _mm512_loadu_ps(tile.bias), high = _mm512_loadu_ps(tile.bias + 16);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      sums[r][0] = _mm512_add_ps(sums[r][0], low);
      sums[r][1] = _mm512_add_ps(sums[r][1], high);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    _mm512_mask_storeu_epi16(tile.y + r * tile.y_stride, tile.columns, round_pair(sums[r][0], sums[r][1]));
  }
}

template <bool kStreams, int... kRows>
constexpr std::array<void (*)(const PairTile&), kPairRows> all_pair_tiles(std::integer_sequence<int, kRows...>) {
  return {(multiply_tile<kRows + 1, kStreams>)...};
}

template <bool kStreams>
constexpr auto kPairTiles = all_pair_tiles<kStreams>(std::make_integer_sequence<int, kPairRows>());

// What a product needs of a packed weight.
struct PairWeight {
  const char* data;
  const float* bias;  // [padded N] or null
  int64_t depth, columns;

  int64_t pairs() const { return (depth + 1) / 2; }
  int64_t panels() const { return (columns + kWidth - 1) / kWidth; }
  int64_t panel_bytes() const { return pairs() * kPairBytes; }
  const char* panel(int64_t p) const { return data + p * panel_bytes(); }
};

// How a product is shared out: its items are the panels for one block of rows after the other.
struct PairShares {
  int64_t blocks, items;
  int threads;

  PairShares(const PairWeight& weight, int64_t rows, int most_threads) {
    const int64_t row_bytes = weight.pairs() * 2 * static_cast<int64_t>(sizeof(Bf16));
    const int64_t most = std::max<int64_t>(kPairBlock / row_bytes / kPairRows, kPairBlockTiles) * kPairRows;
    const int64_t worth = 1 + rows * weight.pairs() * 2 * weight.columns / kPairThreadWork;
    blocks = (rows + most - 1) / most, items = blocks * weight.panels();
    threads = static_cast<int>(std::min<int64_t>({most_threads, worth, quire::MOST_SHARES, items}));
  }
};

// A panel to fetch, or none: null.
struct NextPanel {
  const char* data = nullptr;
  int64_t bytes = 0;
};

// The first panel of a thread's share of the next weight, if there is one.
inline NextPanel first_panel(const PairWeight* weight, int64_t rows, int threads, int64_t share) {
  if (weight == nullptr || weight->depth == 0) return {};
  const PairShares shares(*weight, rows, threads);
  if (share >= shares.threads) return {};
  return {weight->panel(quire::share_start(share, shares.threads, shares.items) % weight->panels()),
          weight->panel_bytes()};
}

// Rows of x times the panels: a block of rows stays in the second-level cache beside the panels. `x` has an even number
// of columns that may be read. `next` is the weight that is likely to be multiplied next, or null.
inline void multiply_pairs(const PairWeight& weight, const PairWeight* next, const Bf16* x, int64_t x_stride,
                           int64_t rows, Bf16* y, int threads) {
  const PairShares shares(weight, rows, threads);
  const int64_t pairs = weight.pairs(), panels = weight.panels();
  const int64_t steps = (pairs + kPairSteps - 1) / kPairSteps;
  const auto multiply = [&](int64_t i, int64_t following, int64_t share) {
    static thread_local const char* fetched = nullptr;
    const int64_t first = i / panels * rows / shares.blocks, end = (i / panels + 1) * rows / shares.blocks;
    const int64_t p = i % panels, tiles = (end - first + kPairRows - 1) / kPairRows;
    const char* panel = weight.panel(p);
    const int64_t column = p * kWidth, left = std::min<int64_t>(weight.columns - column, kWidth);
    const __mmask32 mask = left == kWidth ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    const bool streams = tiles == 1 || panel != fetched;  // the first tile fetches its own panel, just ahead
    NextPanel then;
    if (tiles > 1)
      then = following < 0 ? first_panel(next, rows, threads, share)
                           : NextPanel{weight.panel(following % panels), weight.panel_bytes()};
    fetched = then.data;
    const int64_t fetching = std::max<int64_t>(tiles - streams, 1) * steps;  // chances to fetch
    const int64_t each = (then.bytes / 64 + fetching - 1) / fetching;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = first + t * (end - first) / tiles, count = first + (t + 1) * (end - first) / tiles - row;
      const int64_t from = (t - streams) * steps * each * 64;  // the tiles before have fetched what is before
      const PairTile tile{panel, pairs, x + row * x_stride, x_stride, then.data + from, from < then.bytes ? each : 0,
                          weight.bias == nullptr ? nullptr : weight.bias + column,
                          y + row * weight.columns + column, weight.columns, mask};
      (streams && t == 0 ? kPairTiles<true> : kPairTiles<false>)[count - 1](tile);
    }
  };
  if (rows > kPairRows) return quire::run_shares(shares.items, shares.threads, multiply);
  // A tile that streams fetches its own panels, and the memory answers best if the threads stay near each other.
  quire::shrinking_ranges(shares.items, shares.threads, [&](int64_t begin, int64_t stop) {
    for (int64_t i = begin; i < stop; ++i) multiply(i, -1, 0);
  });
}

}  // namespace
}  // namespace quire_gemm

#endif
