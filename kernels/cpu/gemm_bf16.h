// y = x W^T + b in bfloat16 on CPUs that multiply it in hardware.
//
// VDPBF16PS adds the products of two neighboring k to a float32 lane. Every element of y is one chain of it over the
// pairs of k, ascending, then the bias, then one rounding. Tiles and threads decide only who computes an element, so
// its bits depend on its row of x and its row of W alone. The instruction takes subnormal numbers as zero.
//
// Weights lie in panels of 32 columns, [N / 32][K / 2][32][2], zero-padded. A tile of up to 12 rows runs through a
// whole panel with all its sums in registers. With one tile that is as fast as memory; the next tiles find the panel
// in the second-level cache, and fetch their shares of the next one meanwhile. Many rows are taken in blocks that
// stay in that cache, too.
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
  const char* ahead;    // what to fetch meanwhile,
  int64_t ahead_lines;  // so many lines a pair of k: 0, 1 or 2
  const float* bias;    // of the panel's columns, or null
  Bf16* y;
  int64_t y_stride;
  __mmask32 columns;  // those that y has
};

template <int kRows>
void multiply_tile(const PairTile& tile) {
  __m512 sums[kRows][2];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  const char *w = tile.panel, *ahead = tile.ahead;
  const Bf16* x = tile.x;
  const int64_t x_stride = tile.x_stride, lines = tile.ahead_lines;
  for (int64_t k = 0; k < tile.pairs; ++k, w += kPairBytes, x += 2) {
    if (lines > 0) {
      __builtin_prefetch(ahead, 0, 3);
      if (lines > 1) __builtin_prefetch(ahead + 64, 0, 3);
      ahead += lines * 64;
    }
    const __m512i low = _mm512_loadu_si512(w), high = _mm512_loadu_si512(w + 64);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512i pair = broadcast_pair(x + r * x_stride);
      sums[r][0] = dot(sums[r][0], low, pair);
      sums[r][1] = dot(sums[r][1], high, pair);
    }
  }
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

template <int... kRows>
constexpr std::array<void (*)(const PairTile&), kPairRows> all_pair_tiles(std::integer_sequence<int, kRows...>) {
  return {(multiply_tile<kRows + 1>)...};
}

constexpr auto kPairTiles = all_pair_tiles(std::make_integer_sequence<int, kPairRows>());

// What a product needs of a packed weight.
struct PairWeight {
  const char* panels;
  const float* bias;  // [padded N] or null
  int64_t depth, columns;
};

// Rows of x times the panels, in parts of neighboring panels for one block of rows after the other: a block stays in
// the second-level cache beside the panels. `x` has an even number of columns that may be read.
inline void multiply_pairs(const PairWeight& weight, const Bf16* x, int64_t x_stride, int64_t rows, Bf16* y,
                           int threads) {
  const int64_t pairs = (weight.depth + 1) / 2, panels = (weight.columns + kWidth - 1) / kWidth;
  const int64_t panel_bytes = pairs * kPairBytes, row_bytes = pairs * 2 * static_cast<int64_t>(sizeof(Bf16));
  const int64_t most = std::max<int64_t>(kPairBlock / row_bytes / kPairRows, kPairBlockTiles) * kPairRows;
  const int64_t blocks = (rows + most - 1) / most;
  threads = static_cast<int>(std::min<int64_t>(threads, 1 + rows * pairs * 2 * weight.columns / kPairThreadWork));
  quire::shrinking_ranges(blocks * panels, threads, [&](int64_t begin, int64_t stop) {
    for (int64_t i = begin; i < stop; ++i) {
      const int64_t first = i / panels * rows / blocks, end = (i / panels + 1) * rows / blocks;
      const int64_t p = i % panels, tiles = (end - first + kPairRows - 1) / kPairRows;
      const char* panel = weight.panels + p * panel_bytes;
      const int64_t column = p * kWidth, left = std::min<int64_t>(weight.columns - column, kWidth);
      const __mmask32 mask = left == kWidth ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
      const bool streams = tiles == 1 || i == begin;  // nothing has fetched this panel
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = first + t * (end - first) / tiles, count = first + (t + 1) * (end - first) / tiles - row;
        const char* ahead = panel + kPairsAhead * kPairBytes;
        int64_t lines = 0;
        if (streams && t == 0) {
          lines = 2;
        } else if (i + 1 < stop && t < 2) {  // the next panel: all of it at once, or half by each of the first two
          lines = streams ? 2 : 1;
          ahead = (p + 1 < panels ? panel + panel_bytes : weight.panels) + (streams ? 0 : t * pairs * 64);
        }
        kPairTiles[count - 1](PairTile{panel, pairs, x + row * x_stride, x_stride, ahead, lines,
                                       weight.bias == nullptr ? nullptr : weight.bias + column,
                                       y + row * weight.columns + column, weight.columns, mask});
      }
    }
  });
}

}  // namespace
}  // namespace quire_gemm

#endif
