// The elements of y = x W^T that decide which token a row gets; others become minus infinity.
//
// Codes of 8 bits, half as many bytes as bfloat16, tell how large each element is, but for an error whose bound is
// known. What cannot be the largest even so is not computed. Of the rest, whole panels are, by quire_linear, so every
// element that is finite has the same bits as in the whole product.
//
// A row that draws a token needs its largest element, too, and all of the group that wins the race in sampling.cpp. The
// sum of a group's weights has bounds, and so has its time in the race. All of a group is computed unless it is too late
// even if its sum is as large as it can be. The race then has the same winner, because the other groups' sums are too small,
// and in it the same token.
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
#include "draws.h"
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
constexpr double kLongest = 0x1p80;  // of a longer row, products with codes may overflow

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
  const float* temperature;  // [rows], 0 where the largest element is chosen
  const int64_t* keys;       // [rows], of the draws
  float* y;                  // [rows][N]
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

// A row of x as two of float32: the sum of what their codes stand for is nearly x. Returns |x|, if anything too large,
// and infinity if nothing is to be known of y.
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
  const double length = std::sqrt(squares) * (1.0 + 0x1p-20);
  return length <= kLongest ? static_cast<float>(length) : std::numeric_limits<float>::infinity();
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

// What the codes say is in panel `p`, for row `r`, as two vectors: low and high.
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

// Calls body(begin, end) for ranges of panels, on all threads.
template <class Body>
void for_panels(const Product& product, const Body& body) {
  quire::parallel_ranges(product.panels(), product.threads * kShares, product.threads, body);
}

// Computes the panels that may have the largest element of a row, and notes them in `done`. All else becomes minus
// infinity.
void compute_largest(const Product& product, const float* rough, const float* norms, uint8_t* done) {
  std::atomic<float> least[kRows];
  float limits[kRows];
  for (int64_t r = 0; r < product.rows; ++r) least[r] = kLeast;
  find_least(product, rough, norms, least);
  for (int64_t r = 0; r < product.rows; ++r) {
    // Elements that round to the same number, or to infinity, are equally large, and the first of them counts.
    const Kind kind = kind_of(product.exact.dtype);
    const float most = least[r], limit = most - std::fabs(most) * kind.rounding - kTiny;
    limits[r] = limit > kind.largest ? kind.largest : limit;
  }
  for_panels(product, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      bool none = true;
      for (int64_t r = 0; r < product.rows && none; ++r)
        none = all_below(product, Rough(product, rough, r, p), p, norms[r], limits[r]);
      done[p] = !none;
      if (!none) {
        compute_panel(product, p);
        continue;
      }
      const int64_t columns = product.columns(), there = std::min<int64_t>(columns - p * kWidth, kWidth);
      for (int64_t r = 0; r < product.rows; ++r) std::fill_n(product.y + r * columns + p * kWidth, there, kLeast);
    }
  });
}

// Bounds of the weights of LANES neighboring elements from `id` on, of a row whose largest element is `best`.
struct Bounds {
  quire::vf low, high;
};

struct RowOfWeights {
  const float *y, *rough, *rest, *errors;
  int64_t columns;
  float norm, rounding, largest, best, temperature;

  Bounds at(int64_t id) const {
    using namespace quire;
    const int there = static_cast<int>(std::min<int64_t>(columns - id, LANES));
    if (there <= 0) return {vf{}, vf{}};
    const vf found = load_some(y + id, there), roughly = load_some(rough + id, there) + load_some(rest + id, there);
    const vf coded = load_some(errors + id, there) * splat(norm), size = roughly < vf{} ? -roughly : roughly;
    const vf error = coded + (size + coded) * splat(rounding) + splat(kTiny);
    const vf nothing = splat(kLeast);  // not computed
    vf low = found > nothing ? found : roughly - error;
    const vf high = found > nothing ? found : roughly + error;
    low = low < splat(-largest) ? nothing : low;  // it may round to minus infinity
    Bounds bounds{low == low ? weight(low) : vf{}, weight(high)};  // of what is NaN, nothing is known
    for (int i = there; i < LANES; ++i) bounds.low[i] = bounds.high[i] = 0.0f;
    return bounds;
  }

  quire::vf weight(quire::vf element) const {
    const quire::vf below = (element - quire::splat(best)) / quire::splat(temperature);
    return quire::exp_negative(below < quire::vf{} ? below : quire::vf{});
  }
};

// Marks the panels of all groups that may win the race of row `r`. Where nothing is known, these are all panels.
void mark_groups(const Product& product, const float* rough, float norm, int64_t r, const uint8_t* done, float* earliest,
                 uint8_t* wanted) {
  const int64_t columns = product.columns(), groups = (columns + quire::GROUPS_OF - 1) / quire::GROUPS_OF;
  const float* const y = product.y + r * columns;
  float best = kLeast;
  for (int64_t p = 0; p < product.panels(); ++p) {
    for (int64_t i = p * kWidth; done[p] && i < std::min(columns, (p + 1) * kWidth); ++i) best = y[i] > best ? y[i] : best;
  }
  if (!(norm <= kLargest && std::fabs(best) <= kLargest)) {
    std::fill_n(wanted, product.panels(), uint8_t(1));
    return;
  }
  const float* const rows = rough + 2 * r * columns;
  const Kind kind = kind_of(product.exact.dtype);
  const RowOfWeights row{y, rows, rows + columns, product.errors, columns, norm, kind.rounding, kind.largest, best,
                         product.temperature[r]};
  const uint64_t key = static_cast<uint64_t>(product.keys[r]);
  std::atomic<float> latest{-kLargest};  // minus the time by which some group has certainly arrived
  const int64_t vectors = (groups + quire::LANES - 1) / quire::LANES;
  quire::parallel_for(vectors, product.threads * kShares, product.threads, [&](int64_t v) {
    const int64_t group = v * quire::LANES;
    Bounds sums{};
    for (int64_t id = group; id < quire::GROUPS_OF * groups; id += groups) {
      const Bounds bounds = row.at(id);
      sums.low += bounds.low, sums.high += bounds.high;
    }
    constexpr float kLess = 1.0f - 0x1p-12f, kMore = 1.0f + 0x1p-12f;  // for the rounding of weights, sums and times
    for (int64_t g = group; g < std::min<int64_t>(groups, group + quire::LANES); ++g) {
      const float race = static_cast<float>(-std::log(quire::uniform(key, g + quire::GROUP_CANDIDATES)));
      earliest[g] = race / sums.high[g - group] * kLess;
      raise(latest, -race / sums.low[g - group] * kMore);
    }
  });
  for (int64_t g = 0; g < groups; ++g) {
    if (earliest[g] > -latest) continue;
    for (int64_t id = g; id < columns; id += groups) wanted[id / kWidth] = 1;
  }
}

void multiply(const Product& product) {
  static thread_local quire::Scratch plane_scratch, rough_scratch, time_scratch, panel_scratch;
  const int64_t size = product.exact.in_features, columns = product.columns(), panels = product.panels();
  float* const planes = plane_scratch.room<float>(2 * product.rows * size);
  float* const rough = rough_scratch.room<float>(2 * product.rows * columns);
  float* const earliest = time_scratch.room<float>(columns / quire::GROUPS_OF + 1);
  uint8_t *const done = panel_scratch.room<uint8_t>(2 * panels), *const wanted = done + panels;
  float norms[kRows];
  split_rows(product, planes, norms);
  constexpr int kFloat32 = 2;
  if (quire_codes_linear(&product.coded, kFloat32, planes, size, 2 * product.rows, rough, product.threads))
    throw std::bad_alloc();
  compute_largest(product, rough, norms, done);
  std::fill_n(wanted, panels, uint8_t(0));
  bool draws = false;
  for (int64_t r = 0; r < product.rows; ++r) {
    if (!(product.temperature[r] > 0.0f)) continue;
    mark_groups(product, rough, norms[r], r, done, earliest, wanted);
    draws = true;
  }
  if (!draws) return;
  for_panels(product, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      if (wanted[p] && !done[p]) compute_panel(product, p);
    }
  });
}

}  // namespace
}  // namespace quire_gemm

extern "C" {

// y [rows, N] (float32, dense): of x [rows, K] (`x_stride` elements from row to row) times the screened weight, rounded to
// its dtype, the elements that decide which token each row gets, and some others; the rest is minus infinity. Rows
// with a `temperature` draw a token with their key, without filters; the others, with 0, take the largest element.
// Returns 1 where memory ran out, else 0.
int quire_deciding_logits(const void* screened, const void* x, int64_t x_stride, int64_t rows, const float* temperature,
                          const int64_t* keys, float* y, int threads) {
  using namespace quire_gemm;
  const ScreenedWeight& weight = *static_cast<const ScreenedWeight*>(screened);
  const PackedWeight& exact = *static_cast<const PackedWeight*>(weight.exact);
  const int64_t x_bytes = x_stride * kind_of(exact.dtype).bytes;
  return quire::status_of([&] {
    for (int64_t row = 0; row < rows; row += kRows) {
      multiply({exact, *static_cast<const CodedWeight*>(weight.coded), weight.errors,
                static_cast<const char*>(x) + row * x_bytes, x_bytes, std::min(kRows, rows - row), temperature + row,
                keys + row, y + row * exact.out_features, threads});
    }
  });
}
}
