// y = x W^T + b for few and for many rows, with weights packed once.
//
// Every element of y is one chain of fused multiply-adds in float32 over k = 0, 1, ... K - 1, then the bias, then
// one rounding to y's type. Tiles, blocks of k (which resume the chain from memory) and threads decide only who
// computes an element and when, so its bits depend on its row of x and its row of W alone.
//
// Weights lie in panels of kWidth columns, [N / kWidth][K][kWidth], zero-padded. One tile of rows streams several
// panels at once, which is bound by memory; many rows re-use blocks of a panel that were widened to float32.
//
// Where the CPU multiplies bfloat16 in hardware, gemm_bf16.h takes that over, with a layout of its own.

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "functions.h"
#include "gemm_bf16.h"
#include "gemm_vec.h"
#include "packed_weights.h"
#include "pool.h"
#include "scratch.h"

namespace quire_gemm {
namespace {

constexpr int kAccumulators = 2 * kMaxRows;     // vectors that a tile may keep in registers
constexpr int64_t kDepth = 256;                 // k of one widened block: it stays in the first-level cache
constexpr int64_t kChunkTiles = 16;             // tiles of rows that share a widened block
constexpr int64_t kRowBlock = 32 * kMaxRows * 2;  // rows packed at a time: bounds the scratch memory
constexpr int64_t kWidenTiles = 3;              // from this many tiles on, widening a block first pays
constexpr int64_t kThreadWork = 32768;          // multiply-adds that are worth a thread
constexpr int64_t kShares = 6;                  // parts of the work a thread takes, so that a late one takes fewer
constexpr int kAhead = 1024;                    // bytes of a panel fetched ahead of their use

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `parts` ranges of nearly equal length cover `total`; this is where range `i` starts.
int64_t part_start(int64_t i, int64_t parts, int64_t total) { return i * total / parts; }

// ---- the micro-kernel: kRows rows of x times kPanels panels ----

constexpr int max_panels(int rows) { return std::max(1, kAccumulators / (2 * rows)); }

constexpr int kSteps = 4;  // of k, unrolled

// Lines of 64 bytes that kSteps rows of a panel take.
template <class W>
constexpr int kLines = kSteps * kWidth * static_cast<int>(sizeof(W)) / 64;

// What a micro-kernel fetches ahead while it computes: `lines` lines of each panel per kSteps, from `from` on.
struct Ahead {
  const void* from;
  int lines;
};

// x is [depth][kRows], c is [kRows][kPanels * kWidth]; the chain starts at zero, or at c if `resume`.
template <class W, int kRows, int kPanels>
void micro(const W* w, int64_t panel_stride, const float* x, int64_t depth, float* c, bool resume, Ahead ahead) {
  Vec acc[kRows][kPanels][2];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int p = 0; p < kPanels; ++p) {
      QUIRE_UNROLL for (int h = 0; h < 2; ++h) {
        acc[r][p][h] = resume ? load(c + (r * kPanels + p) * kWidth + h * kLanes) : Vec{};
      }
    }
  }
  auto step = [&](const W* wk, const float* xk) __attribute__((always_inline)) {
    QUIRE_UNROLL for (int p = 0; p < kPanels; ++p) {
      Vec low, high;
      load_pair(wk + p * panel_stride, low, high);
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Vec xr = broadcast(xk[r]);
        acc[r][p][0] = fma(xr, low, acc[r][p][0]);
        acc[r][p][1] = fma(xr, high, acc[r][p][1]);
      }
    }
  };
  const char* fetch = static_cast<const char*>(ahead.from);
  int64_t k = 0;
  for (; k + kSteps <= depth; k += kSteps) {
    for (int line = 0; line < ahead.lines; ++line, fetch += 64) {
      QUIRE_UNROLL for (int p = 0; p < kPanels; ++p) {
        __builtin_prefetch(fetch + p * panel_stride * static_cast<int64_t>(sizeof(W)), 0, 3);
      }
    }
    QUIRE_UNROLL for (int s = 0; s < kSteps; ++s) step(w + s * kWidth, x + s * kRows);
    w += kSteps * kWidth;
    x += kSteps * kRows;
  }
  for (; k < depth; ++k, w += kWidth, x += kRows) step(w, x);
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    QUIRE_UNROLL for (int p = 0; p < kPanels; ++p) {
      QUIRE_UNROLL for (int h = 0; h < 2; ++h) store(c + (r * kPanels + p) * kWidth + h * kLanes, acc[r][p][h]);
    }
  }
}

template <class W>
using Micro = void (*)(const W*, int64_t, const float*, int64_t, float*, bool, Ahead);

template <class W, int kRows, int... kPanels>
constexpr std::array<Micro<W>, kMaxRows> micros_of_rows(std::integer_sequence<int, kPanels...>) {
  return {(micro<W, kRows, kPanels + 1>)...};
}

template <class W, int... kRows>
constexpr std::array<std::array<Micro<W>, kMaxRows>, kMaxRows> all_micros(std::integer_sequence<int, kRows...>) {
  return {micros_of_rows<W, kRows + 1>(std::make_integer_sequence<int, max_panels(kRows + 1)>())...};
}

// kMicros<W>[rows - 1][panels - 1]; null where a tile would not fit the registers.
template <class W>
constexpr auto kMicros = all_micros<W>(std::make_integer_sequence<int, kMaxRows>());

// ---- rows of x ----

// [kRows][depth] with a row stride, to float32 [depth][kRows].
template <class X, int kRows>
void pack_rows(const X* x, int64_t stride, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; ++k) {
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) out[k * kRows + r] = widen(x[r * stride + k]);
  }
}

template <class X, int... kRows>
constexpr std::array<void (*)(const X*, int64_t, int64_t, float*), kMaxRows> all_row_packers(
    std::integer_sequence<int, kRows...>) {
  return {(pack_rows<X, kRows + 1>)...};
}

template <class X>
constexpr auto kRowPackers = all_row_packers<X>(std::make_integer_sequence<int, kMaxRows>());

// Adds the bias and rounds a row of `columns` results.
template <class Y>
void finish_row(const float* c, const float* bias, int64_t columns, Y* y) {
  if (bias == nullptr) {
    for (int64_t i = 0; i < columns; ++i) narrow(c[i], y + i);
  } else {
    for (int64_t i = 0; i < columns; ++i) narrow(c[i] + bias[i], y + i);
  }
}

// The product of one block of rows: who computes what.
template <class W>
class Product {
 public:
  Product(const PackedWeight& weight, const W* x, int64_t x_stride, int64_t rows, W* y, float* scratch)
      : weight_(weight), depth_(weight.in_features), columns_(weight.out_features), x_(x), x_stride_(x_stride),
        rows_(rows), y_(y), packed_(scratch), panels_(divide_up(columns_, kWidth)), tiles_(divide_up(rows, kMaxRows)),
        chunks_(divide_up(tiles_, kChunkTiles)) {}

  void run(int threads) const {
    if (tiles_ == 1) {
      pack_tile(0);
      const int64_t most = max_panels(static_cast<int>(rows_));
      const int64_t groups = std::min(panels_, divide_up(divide_up(panels_, most), threads) * threads);
      quire::parallel_for(groups, threads * kShares, threads, [&](int64_t g) {
        stream_panels(part_start(g, groups, panels_), part_start(g + 1, groups, panels_));
      });
      return;
    }
    quire::parallel_for(tiles_, threads * kShares, threads, [&](int64_t t) { pack_tile(t); });
    quire::parallel_for(chunks_ * panels_, threads * kShares, threads,
                        [&](int64_t i) { chunk_by_panel(i / panels_, i % panels_); });
  }

 private:
  int64_t tile_row(int64_t tile) const { return part_start(tile, tiles_, rows_); }

  const W* panel(int64_t p) const { return static_cast<const W*>(weight_.panels) + p * depth_ * kWidth; }

  void pack_tile(int64_t tile) const {
    const int64_t row = tile_row(tile);
    kRowPackers<W>[tile_row(tile + 1) - row - 1](x_ + row * x_stride_, x_stride_, depth_, packed_ + row * depth_);
  }

  void finish(const float* c, int64_t c_stride, int64_t row, int64_t rows, int64_t column, int64_t columns) const {
    const float* bias = weight_.bias == nullptr ? nullptr : weight_.bias + column;
    columns = std::min(columns, columns_ - column);
    for (int64_t r = 0; r < rows; ++r) finish_row(c + r * c_stride, bias, columns, y_ + (row + r) * columns_ + column);
  }

  // The only tile of rows, times panels [first, last).
  void stream_panels(int64_t first, int64_t last) const {
    const int64_t most = max_panels(static_cast<int>(rows_));
    alignas(64) float c[kAccumulators * kLanes];
    const int64_t groups = divide_up(last - first, most);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t p = first + part_start(g, groups, last - first);
      const int64_t count = first + part_start(g + 1, groups, last - first) - p;
      const Ahead ahead{reinterpret_cast<const char*>(panel(p)) + kAhead, kLines<W>};
      kMicros<W>[rows_ - 1][count - 1](panel(p), depth_ * kWidth, packed_, depth_, c, false, ahead);
      finish(c, count * kWidth, 0, rows_, p * kWidth, count * kWidth);
    }
  }

  // Several tiles of rows times one panel, in blocks of k.
  void chunk_by_panel(int64_t chunk, int64_t p) const {
    alignas(64) float c[kChunkTiles * kMaxRows * kWidth];
    alignas(64) float wide[kDepth * kWidth];
    const int64_t first = part_start(chunk, chunks_, tiles_), last = part_start(chunk + 1, chunks_, tiles_);
    const int64_t row0 = tile_row(first);
    const int64_t blocks = divide_up(depth_, kDepth);
    const int lines = static_cast<int>(divide_up(kLines<W>, last - first));
    const bool widen_first = sizeof(W) < sizeof(float) && last - first >= kWidenTiles;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t k = part_start(block, blocks, depth_), depth = part_start(block + 1, blocks, depth_) - k;
      const W* w = panel(p) + k * kWidth;
      if (widen_first) {
        for (int64_t i = 0; i < depth; ++i) {
          Vec low, high;
          load_pair(w + i * kWidth, low, high);
          store(wide + i * kWidth, low);
          store(wide + i * kWidth + kLanes, high);
        }
      }
      for (int64_t t = first; t < last; ++t) {
        const int64_t row = tile_row(t), rows = tile_row(t + 1) - row;
        const float* x = packed_ + row * depth_ + k * rows;
        float* ct = c + (row - row0) * kWidth;
        // The first tiles fetch the next block, which lies behind this one, a share each.
        const int64_t share = (t - first) * lines;
        const Ahead ahead{reinterpret_cast<const char*>(w + depth * kWidth) + share * (depth / kSteps) * 64,
                          share < kLines<W> ? lines : 0};
        if (widen_first) {
          kMicros<float>[rows - 1][0](wide, 0, x, depth, ct, block > 0, ahead);
        } else {
          kMicros<W>[rows - 1][0](w, 0, x, depth, ct, block > 0, ahead);
        }
      }
    }
    finish(c, kWidth, row0, tile_row(last) - row0, p * kWidth, kWidth);
  }

  const PackedWeight& weight_;
  const int64_t depth_, columns_;
  const W* const x_;
  const int64_t x_stride_, rows_;
  W* const y_;
  float* const packed_;  // float32 tiles [K][rows of the tile], one after the other
  const int64_t panels_, tiles_, chunks_;
};

template <class W>
void multiply(const PackedWeight& weight, const W* x, int64_t x_stride, int64_t rows, W* y, int threads) {
  static thread_local quire::Scratch scratch;
  const int64_t depth = weight.in_features, columns = weight.out_features;
  if (depth == 0) {
    for (int64_t i = 0; i < rows * columns; ++i) narrow(weight.bias ? weight.bias[i % columns] : 0.0f, y + i);
    return;
  }
  const int64_t blocks = divide_up(rows, kRowBlock);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = part_start(block, blocks, rows), count = part_start(block + 1, blocks, rows) - row;
    const int64_t worth = 1 + count * depth * columns / kThreadWork;
    float* packed = scratch.room<float>(count * depth);
    Product<W>(weight, x + row * x_stride, x_stride, count, y + row * columns, packed)
        .run(static_cast<int>(std::min<int64_t>(threads, worth)));
  }
}

#if defined(QUIRE_BF16_PRODUCTS)
constexpr bool kPairs = true;

PairWeight in_pairs(const PackedWeight& weight) {
  return {static_cast<const char*>(weight.panels), weight.bias, weight.in_features, weight.out_features};
}

// As multiply(), in hardware.
void multiply_in_pairs(const PackedWeight& weight, const PackedWeight* next, const Bf16* x, int64_t x_stride,
                       int64_t rows, Bf16* y, int threads) {
  static thread_local quire::Scratch scratch;
  const int64_t depth = weight.in_features;
  if (depth == 0) return multiply(weight, x, x_stride, rows, y, threads);
  if (depth % 2 != 0) {  // the last pair needs a zero
    Bf16* padded = scratch.room<Bf16>(rows * (depth + 1));
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(padded + r * (depth + 1), x + r * x_stride, depth * sizeof(Bf16));
      padded[r * (depth + 1) + depth] = Bf16{};
    }
    x = padded, x_stride = depth + 1;
  }
  PairWeight then{};
  if (next != nullptr && next->dtype == weight.dtype) then = in_pairs(*next);
  multiply_pairs(in_pairs(weight), then.data == nullptr ? nullptr : &then, x, x_stride, rows, y, threads);
}

void pack_pairs(const PackedWeight& weight, const Bf16* w, int64_t stride, int threads) {
  const int64_t depth = weight.in_features, columns = weight.out_features, padded = (depth + 1) / 2 * 2;
  Bf16* const panels = static_cast<Bf16*>(weight.panels);
  quire::parallel_for(divide_up(columns, kWidth), threads * kShares, threads, [&](int64_t p) {
    Bf16* out = panels + p * kWidth * padded;
    for (int64_t k = 0; k < padded; k += 2, out += 2 * kWidth) {
      for (int64_t c = 0; c < kWidth; ++c) {
        const Bf16* from = w + (p * kWidth + c) * stride + k;
        const bool there = p * kWidth + c < columns;
        out[2 * c] = there ? from[0] : Bf16{};
        out[2 * c + 1] = there && k + 1 < depth ? from[1] : Bf16{};
      }
    }
  });
}
#else
constexpr bool kPairs = false;
#endif

template <class W>
void pack(const PackedWeight& weight, const W* w, int64_t stride, int threads) {
  const int64_t depth = weight.in_features, columns = weight.out_features;
  W* const panels = static_cast<W*>(weight.panels);
  quire::parallel_for(divide_up(columns, kWidth), threads * kShares, threads, [&](int64_t p) {
    const int64_t first = p * kWidth;
    W* out = panels + first * depth;
    for (int64_t k = 0; k < depth; ++k, out += kWidth) {
      for (int c = 0; c < kWidth; ++c) {
        out[column_slot<W>(c)] = first + c < columns ? w[(first + c) * stride + k] : W{};
      }
    }
  });
}

}  // namespace
}  // namespace quire_gemm

extern "C" {

// Columns of a panel: N is padded to a multiple of it.
int64_t quire_linear_width() { return quire_gemm::kWidth; }

// Whether bfloat16 is multiplied in hardware: two k at a time, so K is padded to an even number.
int quire_linear_bf16_in_pairs() { return quire_gemm::kPairs; }

// Packs w [N, K] (`stride` elements from row to row) into its `panels`: padded N * K elements.
void quire_linear_pack(const void* packed, const void* w, int64_t stride, int threads) {
  using namespace quire_gemm;
  const PackedWeight* weight = static_cast<const PackedWeight*>(packed);
  switch (weight->dtype) {
    case 0:
#if defined(QUIRE_BF16_PRODUCTS)
      return pack_pairs(*weight, static_cast<const Bf16*>(w), stride, threads);
#else
      return pack(*weight, static_cast<const Bf16*>(w), stride, threads);
#endif
    case 1: return pack(*weight, static_cast<const Fp16*>(w), stride, threads);
    default: return pack(*weight, static_cast<const float*>(w), stride, threads);
  }
}

// y [rows, N] (dense) = x [rows, K] (`x_stride` elements from row to row) times the packed weight, plus its bias.
// `next` is the packed weight that is likely to be multiplied next, or null: its first panels are fetched meanwhile.
// Returns 1 where memory ran out, else 0.
int quire_linear(const void* packed, const void* x, int64_t x_stride, int64_t rows, void* y, int threads,
                 [[maybe_unused]] const void* next) {
  using namespace quire_gemm;
  const PackedWeight* weight = static_cast<const PackedWeight*>(packed);
  return quire::status_of([&] {
    switch (weight->dtype) {
      case 0:
#if defined(QUIRE_BF16_PRODUCTS)
        return multiply_in_pairs(*weight, static_cast<const PackedWeight*>(next), static_cast<const Bf16*>(x),
                                 x_stride, rows, static_cast<Bf16*>(y), threads);
#else
        return multiply(*weight, static_cast<const Bf16*>(x), x_stride, rows, static_cast<Bf16*>(y), threads);
#endif
      case 1:
        return multiply(*weight, static_cast<const Fp16*>(x), x_stride, rows, static_cast<Fp16*>(y), threads);
      default:
        return multiply(*weight, static_cast<const float*>(x), x_stride, rows, static_cast<float*>(y), threads);
    }
  });
}
}
