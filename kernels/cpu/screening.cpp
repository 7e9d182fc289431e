// The elements of y = x W^T that may be the largest of their row; all others become minus infinity.
//
// Codes of 8 bits, half as many bytes as bfloat16, tell how large each element is, but for an error whose bound is
// known. What cannot be the largest even so is not computed. Of the rest, whole panels are, by quire_linear, so every
// element that is finite has the same bits as in the whole product.
//
// An element is off by at most |w - coded w| |x| (Cauchy and Schwarz), and the rounding of sums. A row of x is coded
// twice, its codes' error the second time, after which 1/2**14 of it is left. Where x is not finite, nothing is known of
// y, and all of it is computed.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>

#include "code_rows.h"
#include "functions.h"
#include "gemm_vec.h"
#include "packed_weights.h"
#include "pool.h"
#include "scratch.h"

namespace quire_gemm {
namespace {

constexpr int64_t kRows = 8;     // of x, at a time
constexpr int64_t kShares = 6;   // parts of the work a thread takes, so that a late one takes fewer
constexpr float kLeast = -std::numeric_limits<float>::infinity();
constexpr float kTiny = 0x1p-22f;  // more than the smallest numbers of any dtype may be off

// Mirrored by `_Descriptor` in screened.py.
struct ScreenedWeight {
  const void* exact;   // PackedWeight, without a bias
  const void* coded;   // CodedWeight of 8 bits, without a bias
  const float* errors;  // [padded N]: how much an element may be off for each unit of |x|
};

struct Product {
  const PackedWeight& exact;
  const CodedWeight& coded;
  const float* errors;
  const void* x;
  int64_t x_bytes;  // from row to row
  int64_t rows;     // at most kRows
  float* y;         // [rows][N]
  int threads;

  int64_t columns() const { return exact.out_features; }
  int64_t panels() const { return (columns() + kWidth - 1) / kWidth; }
};

// Numbers of one dtype.
struct Kind {
  int64_t bytes;
  float rounding;  // how far apart two may be, relative to their size, that round to the same
  float largest;   // finite one
};

Kind kind_of(int64_t dtype) {
  if (dtype == 0) return {2, 0x1p-7f, 0x1.fep127f};
  if (dtype == 1) return {2, 0x1p-10f, 65504.0f};
  return {4, 0x1p-22f, kLargest};
}

// A row of x as two of float32: the sum of what their codes stand for is nearly x. Returns |x|, if anything too large.
template <class X>
float split_row(const X* x, int64_t size, float* row, float* rest) {
  double squares = 0.0;
  for (int64_t k = 0; k < size; k += kGroup) {
    int8_t codes[kGroup];
    const int64_t count = std::min(kGroup, size - k);
    const float scale = code_group(x + k, count, codes).scale;
    for (int64_t i = 0; i < count; ++i) {
      const float value = widen(x[k + i]);
      row[k + i] = value;
      rest[k + i] = value - scale * static_cast<float>(codes[i]);
      squares += static_cast<double>(value) * value;
    }
  }
  return static_cast<float>(std::sqrt(squares) * (1.0 + 0x1p-20));
}

void split_rows(const Product& product, float* planes, float* norms) {
  const int64_t size = product.exact.in_features;
  for (int64_t r = 0; r < product.rows; ++r) {
    const void* x = static_cast<const char*>(product.x) + r * product.x_bytes;
    float *row = planes + 2 * r * size, *rest = row + size;
    switch (product.exact.dtype) {
      case 0: norms[r] = split_row(static_cast<const Bf16*>(x), size, row, rest); break;
      case 1: norms[r] = split_row(static_cast<const Fp16*>(x), size, row, rest); break;
      default: norms[r] = split_row(static_cast<const float*>(x), size, row, rest);
    }
  }
}

// Vector `h` of a panel's columns in a row of N; minus infinity where there is no column.
QUIRE_INLINE Vec columns_of(const float* row, int64_t panel, int h, int64_t columns) {
  const int64_t first = panel * kWidth + h * kLanes, there = columns - first;
  if (there >= kLanes) return load(row + first);
  Vec some = broadcast(kLeast);
  for (int64_t i = 0; i < there; ++i) some[i] = row[first + i];
  return some;
}

// What is roughly in panel `p`, for row `r`, as two vectors: low and high.
struct Rough {
  Vec halves[2];

  Rough(const Product& product, const float* rough, int64_t r, int64_t p) {
    const float* row = rough + 2 * r * product.columns();
    for (int h = 0; h < 2; ++h) {
      halves[h] = columns_of(row, p, h, product.columns()) + columns_of(row + product.columns(), p, h, product.columns());
    }
  }
};

void raise(std::atomic<float>& most, float value) {
  float before = most;
  while (value > before && !most.compare_exchange_weak(before, value)) {
  }
}

// What a row's largest element is at least.
void find_least(const Product& product, const float* rough, const float* norms, std::atomic<float>* least) {
  const int64_t panels = product.panels();
  quire::parallel_ranges(panels, product.threads * kShares, product.threads, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < product.rows; ++r) {
      Vec most = broadcast(kLeast);
      for (int64_t p = begin; p < end; ++p) {
        const Rough here(product, rough, r, p);
        for (int h = 0; h < 2; ++h) {
          const Vec low = here.halves[h] - load(product.errors + p * kWidth + h * kLanes) * broadcast(norms[r]);
          most = low > most ? low : most;
        }
      }
      float best = kLeast;
      for (int i = 0; i < kLanes; ++i) best = most[i] > best ? most[i] : best;
      raise(least[r], best);
    }
  });
}

// Whether no element of a panel can be `limit`; false if anything is NaN.
QUIRE_INLINE bool all_below(const Product& product, const Rough& here, int64_t p, float norm, float limit) {
  const auto below = [&](int h) {
    return here.halves[h] + load(product.errors + p * kWidth + h * kLanes) * broadcast(norm) < broadcast(limit);
  };
  const auto both = below(0) & below(1);
  uint64_t words[kLanes / 2], all = ~uint64_t(0);
  std::memcpy(words, &both, sizeof(words));
  for (const uint64_t word : words) all &= word;
  return all == ~uint64_t(0);
}

// Computes a panel's columns of all rows.
void compute_panel(const Product& product, int64_t p) {
  const Kind kind = kind_of(product.exact.dtype);
  PackedWeight panel = product.exact;
  const int64_t depth = panel.in_features + (panel.dtype == 0 && quire_linear_bf16_in_pairs() ? panel.in_features % 2 : 0);
  const int64_t there = std::min<int64_t>(panel.out_features - p * kWidth, kWidth);
  panel.panels = static_cast<char*>(panel.panels) + p * depth * kWidth * kind.bytes;
  panel.out_features = there;
  alignas(64) char made[kRows * kWidth * sizeof(float)];
  const int64_t x_stride = product.x_bytes / kind.bytes;
  if (quire_linear(&panel, product.x, x_stride, product.rows, made, 1, nullptr)) throw std::bad_alloc();
  for (int64_t r = 0; r < product.rows; ++r) {
    float* y = product.y + r * product.columns() + p * kWidth;
    const char* from = made + r * there * kind.bytes;
    for (int64_t c = 0; c < there; ++c) {
      switch (panel.dtype) {
        case 0: y[c] = widen(reinterpret_cast<const Bf16*>(from)[c]); break;
        case 1: y[c] = widen(reinterpret_cast<const Fp16*>(from)[c]); break;
        default: y[c] = reinterpret_cast<const float*>(from)[c];
      }
    }
  }
}

void multiply(const Product& product) {
  static thread_local quire::Scratch plane_scratch, rough_scratch;
  const int64_t size = product.exact.in_features, columns = product.columns();
  float* const planes = plane_scratch.room<float>(2 * product.rows * size);
  float* const rough = rough_scratch.room<float>(2 * product.rows * columns);
  float norms[kRows], limits[kRows];
  split_rows(product, planes, norms);
  constexpr int kFloat32 = 2;
  if (quire_codes_linear(&product.coded, kFloat32, planes, size, 2 * product.rows, rough, product.threads))
    throw std::bad_alloc();
  std::atomic<float> least[kRows];
  for (int64_t r = 0; r < product.rows; ++r) least[r] = kLeast;
  find_least(product, rough, norms, least);
  for (int64_t r = 0; r < product.rows; ++r) {
    // Elements that round to the same number, or to infinity, are equally large, and the first of them counts.
    const Kind kind = kind_of(product.exact.dtype);
    const float most = least[r], limit = most - std::fabs(most) * kind.rounding - kTiny;
    limits[r] = limit > kind.largest ? kind.largest : limit;
  }
  const int64_t panels = product.panels();
  quire::parallel_ranges(panels, product.threads * kShares, product.threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      bool none = true;
      for (int64_t r = 0; r < product.rows && none; ++r)
        none = all_below(product, Rough(product, rough, r, p), p, norms[r], limits[r]);
      if (!none) {
        compute_panel(product, p);
        continue;
      }
      const int64_t there = std::min<int64_t>(columns - p * kWidth, kWidth);
      for (int64_t r = 0; r < product.rows; ++r) std::fill_n(product.y + r * columns + p * kWidth, there, kLeast);
    }
  });
}

}  // namespace
}  // namespace quire_gemm

extern "C" {

// y [rows, N] (float32, dense): the elements of x [rows, K] (`x_stride` elements from row to row) times the screened
// weight, rounded to its dtype, that may be the largest of their row, and some others; the rest is minus infinity.
// Returns 1 where memory ran out, else 0.
int quire_largest_logits(const void* screened, const void* x, int64_t x_stride, int64_t rows, void* y, int threads) {
  using namespace quire_gemm;
  const ScreenedWeight& weight = *static_cast<const ScreenedWeight*>(screened);
  const PackedWeight& exact = *static_cast<const PackedWeight*>(weight.exact);
  const int64_t x_bytes = x_stride * kind_of(exact.dtype).bytes;
  return quire::status_of([&] {
    for (int64_t row = 0; row < rows; row += kRows) {
      multiply({exact, *static_cast<const CodedWeight*>(weight.coded), weight.errors,
                static_cast<const char*>(x) + row * x_bytes, x_bytes, std::min(kRows, rows - row),
                static_cast<float*>(y) + row * exact.out_features, threads});
    }
  });
}
}
