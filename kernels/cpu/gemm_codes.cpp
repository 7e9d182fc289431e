// y = x W^T + b with weights of 4 or 8 bits.
//
// A weight is code * scale + minimum, with a scale and, with 4 bits, a minimum for each group of 32 neighboring k.
// Each row of x is coded likewise first, in 8 bits without minima. An element of y is one chain over the groups,
// ascending:
//
//     sum = fma(dot * x_scale, scale, sum), then sum = fma(x_sum, minimum, sum)
//
// where `dot` is the exact sum of the products of a group's codes and `x_sum` is x_scale times the sum of x's codes.
// Then comes the bias, then one rounding. So its bits depend on its row of x and its row of W alone, and are the same
// on all CPUs with fused multiply-adds.
//
// Weights lie in panels of kWidth columns, [N / kWidth][groups], zero-padded. A group has its codes, eight k at a time,
// then a scale for each column in float16, then a minimum. A tile of rows unpacks 4 bits in registers: tiles that share
// an unpacked copy are no faster, however many there are.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "code_rows.h"
#include "functions.h"
#include "gemm_codes.h"
#include "gemm_vec.h"
#include "packed_weights.h"
#include "pool.h"
#include "scratch.h"

namespace quire_gemm {
namespace {

constexpr int kTileRows = kLanes == 16 ? 6 : 3;  // two vectors a row of dots and of sums each fill the registers
constexpr int64_t kRowBlock = 4096;              // rows coded at a time: bounds the scratch memory
constexpr int64_t kAhead = 3072;                 // bytes of a panel fetched ahead of their use
constexpr int64_t kThreadWork = 1 << 17;         // multiply-adds that are worth a thread
constexpr int64_t kShares = 6;                   // parts of the work a thread takes, so that a late one takes fewer
constexpr int kStep = 8;                         // k of a step
constexpr int kSteps = kGroup / kStep;

constexpr int64_t kScalesBytes = kWidth * 2;
constexpr int64_t step_bytes(int64_t bits) { return kWidth * kStep * bits / 8; }
constexpr int64_t group_bytes(int64_t bits) { return kSteps * step_bytes(bits) + kScalesBytes * (bits == 8 ? 1 : 2); }

int64_t groups_of(const CodedWeight& weight) { return (weight.in_features + kGroup - 1) / kGroup; }
int64_t panels_of(const CodedWeight& weight) { return (weight.out_features + kWidth - 1) / kWidth; }

// ---- the micro-kernel: kRows rows of x times a panel ----

struct CodeTile {
  const uint8_t* panel;
  int64_t count;           // of groups
  const int8_t* x;         // codes, [kRows][count][kGroup]
  const RowGroup* groups;  // [kRows][count]
  float* sums;             // [kRows][kWidth]
};

template <int kBits, int kRows>
void multiply_codes(const CodeTile& tile) {
  const int64_t count = tile.count;
  Vec sums[kRows][2];
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = Vec{};
  const uint8_t* w = tile.panel;
  const int8_t* x = tile.x;
  for (const RowGroup* group = tile.groups; group < tile.groups + count; ++group) {
    Ints dots[kRows][2];
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      dots[r][0] = dots[r][1] = kBits == 8 ? fill(group[r * count].offset) : Ints{};
    }
    QUIRE_UNROLL for (int step = 0; step < kSteps; ++step, x += kStep, w += step_bytes(kBits)) {
      for (int64_t line = 0; line < step_bytes(kBits); line += 64) __builtin_prefetch(w + kAhead + line, 0, 3);
      Ints quads[2][2];  // four k each, of both vectors of columns
      if constexpr (kBits == 4) {
        QUIRE_UNROLL for (int h = 0; h < 2; ++h) {
          const Ints both = load_codes(w + h * kQuad);
          quads[0][h] = both & fill(0x0f0f0f0f);
          quads[1][h] = (both >> 4) & fill(0x0f0f0f0f);
        }
      } else {
        QUIRE_UNROLL for (int q = 0; q < 2; ++q) {
          QUIRE_UNROLL for (int h = 0; h < 2; ++h) quads[q][h] = load_codes(w + (2 * q + h) * kQuad);
        }
      }
      QUIRE_UNROLL for (int q = 0; q < 2; ++q) {
        QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
          const int8_t* four = x + r * count * kGroup + 4 * q;
          dots[r][0] = dot(dots[r][0], quads[q][0], four);
          dots[r][1] = dot(dots[r][1], quads[q][1], four);
        }
      }
    }
    Vec low, high;
    load_pair(reinterpret_cast<const Fp16*>(w), low, high);
    QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec scale = broadcast(group[r * count].scale);
      sums[r][0] = fma(to_floats(dots[r][0]) * scale, low, sums[r][0]);
      sums[r][1] = fma(to_floats(dots[r][1]) * scale, high, sums[r][1]);
    }
    if constexpr (kBits == 4) {
      w += kScalesBytes;
      load_pair(reinterpret_cast<const Fp16*>(w), low, high);
      QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Vec sum = broadcast(group[r * count].sum);
        sums[r][0] = fma(sum, low, sums[r][0]);
        sums[r][1] = fma(sum, high, sums[r][1]);
      }
    }
    w += kScalesBytes;
  }
  QUIRE_UNROLL for (int r = 0; r < kRows; ++r) {
    store(tile.sums + r * kWidth, sums[r][0]);
    store(tile.sums + r * kWidth + kLanes, sums[r][1]);
  }
}

template <int kBits, int... kRows>
constexpr std::array<void (*)(const CodeTile&), kTileRows> all_code_tiles(std::integer_sequence<int, kRows...>) {
  return {(multiply_codes<kBits, kRows + 1>)...};
}

template <int kBits>
constexpr auto kCodeTiles = all_code_tiles<kBits>(std::make_integer_sequence<int, kTileRows>());

// ---- the product ----

template <class X>
void multiply(const CodedWeight& weight, const X* x, int64_t x_stride, int64_t rows, X* y, int threads) {
  static thread_local quire::Scratch code_scratch, group_scratch;
  const int64_t size = weight.in_features, columns = weight.out_features, count = groups_of(weight);
  int8_t* const codes = code_scratch.room<int8_t>(rows * count * kGroup);
  RowGroup* const groups = group_scratch.room<RowGroup>(rows * count);
  threads = static_cast<int>(std::min<int64_t>(threads, 1 + rows * size * columns / kThreadWork));
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  quire::parallel_for(rows, threads * kShares, tiles > 1 ? threads : 1, [&](int64_t r) {
    code_row(x + r * x_stride, size, codes + r * count * kGroup, groups + r * count);
  });
  const auto& run = weight.bits == 8 ? kCodeTiles<8> : kCodeTiles<4>;
  const auto multiply_panel = [&](int64_t p) {
    const uint8_t* panel = static_cast<const uint8_t*>(weight.panels) + p * count * group_bytes(weight.bits);
    const int64_t column = p * kWidth, there = std::min<int64_t>(columns - column, kWidth);
    const float* bias = weight.bias == nullptr ? nullptr : weight.bias + column;
    alignas(64) float sums[kTileRows * kWidth];
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * rows / tiles, tile_rows = (t + 1) * rows / tiles - row;
      run[tile_rows - 1]({panel, count, codes + row * count * kGroup, groups + row * count, sums});
      for (int64_t r = 0; r < tile_rows; ++r) {
        X* out = y + (row + r) * columns + column;
        const float* from = sums + r * kWidth;
        if (bias == nullptr) {
          for (int64_t c = 0; c < there; ++c) narrow(from[c], out + c);
        } else {
          for (int64_t c = 0; c < there; ++c) narrow(from[c] + bias[c], out + c);
        }
      }
    }
  };
  quire::shrinking_ranges(panels_of(weight), threads, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) multiply_panel(p);
  });
}

template <class X>
void multiply_blocks(const CodedWeight& weight, const void* x, int64_t x_stride, int64_t rows, void* y, int threads) {
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    multiply(weight, static_cast<const X*>(x) + row * x_stride, x_stride, std::min(kRowBlock, rows - row),
             static_cast<X*>(y) + row * weight.out_features, threads);
  }
}

// ---- coding and packing weights ----

enum Coded : int { kDone = 0, kNotFinite = 1, kTooLarge = 2, kNotExact = 3 };

QUIRE_INLINE Vec nearest(Vec x) {
  const Vec shift = broadcast(12582912.0f);  // 1.5 * 2**23: what is added to it rounds to an integer
  return x + shift - shift;
}

// Rounds to float16, and stores that too.
QUIRE_INLINE Vec as_half(Vec x, Fp16* out) {
  QUIRE_UNROLL for (int i = 0; i < kLanes; ++i) {
    narrow(x[i], out + i);
    x[i] = widen(out[i]);
  }
  return x;
}

QUIRE_INLINE VecBits sizes_of(Vec x) { return bit_cast<VecBits>(x) & 0x7fffffffu; }

// A group of kLanes columns at a time, a column a lane: each column's sums are chains over its k, ascending. `wide` and
// `codes` have kGroup elements.

// All ones where a weight is further from what its code means than rounding to 16 bits moves it, as codes.py has it.
QUIRE_INLINE VecBits misses(Vec weight, Vec meant, Vec scale) {
  const Vec error = bit_cast<Vec>(sizes_of(meant - weight)), size = bit_cast<Vec>(sizes_of(weight));
  return bit_cast<VecBits>(error > size * broadcast(0x1p-8f) + bit_cast<Vec>(sizes_of(scale)) * broadcast(0x1p-6f));
}

// The least squares of errors for a group of 4 bits, as codes.py has it. Counts the weights that miss in `missed`.
QUIRE_INLINE void encode_four(const Vec* wide, VecBits* codes, Fp16* scales, Fp16* minima, VecBits* missed) {
  const Vec zero{}, one = broadcast(1.0f), size = broadcast(kGroup);
  Vec low = wide[0], high = wide[0], sum{};
  for (int i = 0; i < kGroup; ++i) {
    low = wide[i] < low ? wide[i] : low, high = high < wide[i] ? wide[i] : high, sum += wide[i];
  }
  const Vec fifteenth = (high - low) / broadcast(15.0f), step = fifteenth > zero ? fifteenth : one;  // it may underflow
  Vec code[kGroup], code_sum{};
  for (int i = 0; i < kGroup; ++i) code[i] = nearest((wide[i] - low) / step), code_sum += code[i];
  const Vec mean = sum / size, code_mean = code_sum / size;
  Vec both{}, squares{};
  for (int i = 0; i < kGroup; ++i) {
    const Vec away = code[i] - code_mean;
    both += away * (wide[i] - mean), squares += away * away;
  }
  const Vec scale = as_half(squares > zero ? both / squares : zero, scales);
  const Vec minimum = as_half(mean - scale * code_mean, minima);
  const Vec divisor = scale != zero ? scale : one, most = broadcast(15.0f);
  for (int i = 0; i < kGroup; ++i) {
    Vec nearby = nearest((wide[i] - minimum) / divisor);
    nearby = nearby < zero ? zero : nearby;
    nearby = most < nearby ? most : nearby;
    codes[i] = bit_cast<VecBits>(__builtin_convertvector(nearby, Ints));
    *missed -= misses(wide[i], nearby * scale + minimum, scale);
  }
}

QUIRE_INLINE void encode_eight(const Vec* wide, VecBits* codes, Fp16* scales, VecBits* missed) {
  const Vec zero{};
  VecBits sizes{};
  for (int i = 0; i < kGroup; ++i) {
    const VecBits bits = sizes_of(wide[i]);
    sizes = bits > sizes ? bits : sizes;
  }
  const Vec part = bit_cast<Vec>(sizes) / broadcast(127.0f), step = part > zero ? part : broadcast(1.0f);
  Vec code[kGroup], both{}, squares{};
  for (int i = 0; i < kGroup; ++i) {
    code[i] = nearest(wide[i] / step);
    codes[i] = bit_cast<VecBits>(__builtin_convertvector(code[i], Ints)) & 0xffu;
    both += code[i] * wide[i], squares += code[i] * code[i];
  }
  const Vec scale = as_half(squares > zero ? both / squares : zero, scales);
  for (int i = 0; i < kGroup; ++i) *missed -= misses(wide[i], code[i] * scale, scale);
}

// kLanes columns of a panel, from `there` rows of W; the others become zero.
template <class W>
Coded pack_columns(const CodedWeight& weight, const W* w, int64_t stride, int64_t there, int half, uint8_t* panel) {
  constexpr uint32_t kInfinite = 0x7f800000u, kHalfInfinite = 0x7c00u;
  const int64_t bits = weight.bits, size = weight.in_features;
  Vec wide[kGroup]{};
  VecBits codes[kGroup], missed{};
  bool exact = true;
  for (int64_t k = 0; k < size; k += kGroup, panel += group_bytes(bits)) {
    for (int64_t c = 0; c < there; ++c) {
      const W* from = w + c * stride + k;
      float* const to = reinterpret_cast<float*>(wide) + c;
      if (size - k >= kGroup) {  // a loop of known length
        QUIRE_UNROLL for (int i = 0; i < kGroup; ++i) to[i * kLanes] = widen(from[i]);
      } else {  // copies of the last one, so that extremes stay
        for (int64_t i = 0; i < kGroup; ++i) to[i * kLanes] = widen(from[std::min(i, size - 1 - k)]);
      }
    }
    VecBits sizes{};
    for (int i = 0; i < kGroup; ++i) sizes = sizes_of(wide[i]) > sizes ? sizes_of(wide[i]) : sizes;
    if (largest(sizes) >= kInfinite) return kNotFinite;
    const VecBits missed_before = missed;
    Fp16* const scales = reinterpret_cast<Fp16*>(panel + kSteps * step_bytes(bits)) + half * kLanes;
    if (bits == 8) {
      encode_eight(wide, codes, scales, &missed);
    } else {
      encode_four(wide, codes, scales, scales + kWidth, &missed);
    }
    exact &= total(missed - missed_before) * 4 <= static_cast<uint64_t>(there * kGroup);
    for (int c = 0; c < kLanes; ++c) {
      for (int64_t which = 0; which < (bits == 8 ? 1 : 2); ++which) {
        if ((scales[which * kWidth + c].bits & 0x7fffu) >= kHalfInfinite) return kTooLarge;
      }
    }
    for (int64_t i = size - k; i < kGroup; ++i) codes[i] = VecBits{};
    for (int step = 0; step < kSteps; ++step) {
      VecBits quads[2];
      for (int q = 0; q < 2; ++q) {
        const VecBits* four = codes + step * kStep + 4 * q;
        quads[q] = four[0] | four[1] << 8 | four[2] << 16 | four[3] << 24;
      }
      uint8_t* const to = panel + step * step_bytes(bits) + half * kQuad;
      if (bits == 8) {
        for (int q = 0; q < 2; ++q) {
          quads[q] ^= kCodeOffset * 0x01010101u;  // adds 128 to each
          std::memcpy(to + q * 2 * kQuad, &quads[q], sizeof(VecBits));
        }
      } else {
        quads[0] |= quads[1] << 4;
        std::memcpy(to, quads, sizeof(VecBits));
      }
    }
  }
  exact &= largest(missed) * 8 <= static_cast<uint64_t>(groups_of(weight) * kGroup);
  return exact ? kDone : kNotExact;
}

template <class W>
Coded pack_codes(const CodedWeight& weight, const W* w, int64_t stride, int threads) {
  const int64_t panel_bytes = groups_of(weight) * group_bytes(weight.bits);
  std::atomic<Coded> result{kDone};
  quire::parallel_for(panels_of(weight), threads * kShares, threads, [&](int64_t p) {
    uint8_t* panel = static_cast<uint8_t*>(weight.panels) + p * panel_bytes;
    for (int half = 0; half < 2; ++half) {
      const int64_t column = p * kWidth + half * kLanes;
      const int64_t there = std::max<int64_t>(std::min<int64_t>(weight.out_features - column, kLanes), 0);
      const Coded done = pack_columns(weight, w + column * stride, stride, there, half, panel);
      Coded exact = kDone;
      if (done == kNotExact) {
        result.compare_exchange_strong(exact, done);  // a fault counts more
      } else if (done != kDone) {
        result = done;
      }
    }
  });
  return result;
}

// ---- how far codes are from their weights ----

// The squares of a column's weights, and of the errors of its codes of 8 bits.
struct Squares {
  double weights, errors;
};

template <class W>
Squares squares_of(const CodedWeight& weight, const W* w, int64_t column, const uint8_t* panel) {
  const int64_t size = weight.in_features, place = column % kWidth, half = place / kLanes, lane = place % kLanes;
  Squares squares{};
  for (int64_t k = 0; k < size; k += kGroup, panel += group_bytes(8)) {
    const float scale = widen(reinterpret_cast<const Fp16*>(panel + kSteps * step_bytes(8))[place]);
    for (int64_t i = 0; i < std::min(kGroup, size - k); ++i) {
      const int64_t quad = (i % kStep) / 4 * 2 + half;
      const uint8_t byte = panel[i / kStep * step_bytes(8) + quad * kQuad + lane * 4 + i % 4];
      const int code = kCodeOffset ? byte - kCodeOffset : static_cast<int8_t>(byte);
      const double value = widen(w[k + i]), error = value - static_cast<double>(scale) * code;
      squares.weights += value * value, squares.errors += error * error;
    }
  }
  return squares;
}

template <class W>
void bound_errors(const CodedWeight& weight, const W* w, int64_t stride, float* errors, int threads) {
  const double rounding = 0x1p-12 + static_cast<double>(weight.in_features) * 0x1p-22;
  const int64_t columns = weight.out_features;
  quire::parallel_for(columns, threads * kShares, threads, [&](int64_t column) {
    const uint8_t* panel = static_cast<const uint8_t*>(weight.panels) + column / kWidth * groups_of(weight) * group_bytes(8);
    const Squares squares = squares_of(weight, w + column * stride, column, panel);
    errors[column] = static_cast<float>(1.001 * std::sqrt(squares.errors) + rounding * std::sqrt(squares.weights));
  });
}

}  // namespace
}  // namespace quire_gemm

extern "C" {

// Whether this CPU has instructions for sums of products of bytes.
int quire_codes_in_hardware() { return quire_gemm::kHardware; }

// Bytes of a weight's panels.
int64_t quire_codes_bytes(const void* packed) {
  using namespace quire_gemm;
  const CodedWeight& weight = *static_cast<const CodedWeight*>(packed);
  return panels_of(weight) * groups_of(weight) * group_bytes(weight.bits);
}

// Codes w [N, K] (`stride` elements from row to row) into `panels`. Returns 1 where a weight is not finite, 2 where one is
// too large for a scale in float16, 3 where it is done but an eighth of a row, or a quarter of a group in neighboring rows,
// are weights that were not such codes, else 0.
int quire_codes_pack(const void* packed, int dtype, const void* w, int64_t stride, int threads) {
  using namespace quire_gemm;
  const CodedWeight& weight = *static_cast<const CodedWeight*>(packed);
  switch (dtype) {
    case 0: return pack_codes(weight, static_cast<const Bf16*>(w), stride, threads);
    case 1: return pack_codes(weight, static_cast<const Fp16*>(w), stride, threads);
    default: return pack_codes(weight, static_cast<const float*>(w), stride, threads);
  }
}

// For each row of w [N, K], which was packed with 8 bits: how far an element of y may be from the product without codes,
// for each unit of the length of its row of x, if x is coded twice as in screening.cpp.
void quire_codes_errors(const void* packed, int dtype, const void* w, int64_t stride, float* errors, int threads) {
  using namespace quire_gemm;
  const CodedWeight& weight = *static_cast<const CodedWeight*>(packed);
  switch (dtype) {
    case 0: return bound_errors(weight, static_cast<const Bf16*>(w), stride, errors, threads);
    case 1: return bound_errors(weight, static_cast<const Fp16*>(w), stride, errors, threads);
    default: return bound_errors(weight, static_cast<const float*>(w), stride, errors, threads);
  }
}

// y [rows, N] (dense) = x [rows, K] (`x_stride` elements from row to row) times the packed weight, plus its bias.
// `dtype` is that of x and y. Returns 1 where memory ran out, else 0.
int quire_codes_linear(const void* packed, int dtype, const void* x, int64_t x_stride, int64_t rows, void* y,
                       int threads) {
  using namespace quire_gemm;
  const CodedWeight& weight = *static_cast<const CodedWeight*>(packed);
  return quire::status_of([&] {
    switch (dtype) {
      case 0: return multiply_blocks<Bf16>(weight, x, x_stride, rows, y, threads);
      case 1: return multiply_blocks<Fp16>(weight, x, x_stride, rows, y, threads);
      default: return multiply_blocks<float>(weight, x, x_stride, rows, y, threads);
    }
  });
}
}
