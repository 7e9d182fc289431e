// Rows of x as codes of 8 bits, in groups of 32 neighboring k, each with a scale.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "gemm_codes.h"
#include "gemm_vec.h"

namespace quire_gemm {
namespace {

constexpr int64_t kGroup = 32;  // k of a group
constexpr float kLargest = std::numeric_limits<float>::max();

// What the codes of a group of x stand for.
struct RowGroup {
  float scale;
  float sum;       // scale times the sum of the codes
  int32_t offset;  // what shifted codes of the weight add to a dot, negated
};

// Codes a group of which there are `count` elements: the largest size becomes 127. A NaN or an infinity makes the
// scale one.
template <class X>
RowGroup code_group(const X* x, int64_t count, int8_t* codes) {
  constexpr int kParts = kGroup / kLanes;
  alignas(64) float wide[kGroup];
  if (count == kGroup) {  // a loop of known length
    for (int i = 0; i < kGroup; ++i) wide[i] = widen(x[i]);
  } else {
    for (int i = 0; i < kGroup; ++i) wide[i] = i < count ? widen(x[i]) : 0.0f;
  }
  Vec parts[kParts];
  std::memcpy(parts, wide, sizeof(parts));
  VecBits sizes{};
  QUIRE_UNROLL for (int i = 0; i < kParts; ++i) {
    const VecBits bits = bit_cast<VecBits>(parts[i]) & 0x7fffffffu;
    sizes = bits > sizes ? bits : sizes;
  }
  const uint32_t most = largest(sizes);
  const float size = bit_cast<float>(most), scale = size * (1.0f / 127.0f);
  const float inverse = scale > 0.0f ? std::min(127.0f / size, kLargest) : 0.0f;
  const float shift = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest integer in the lowest bits
  VecBits sums{};
  QUIRE_UNROLL for (int i = 0; i < kParts; ++i) {
    const VecBits code = bit_cast<VecBits>(parts[i] * broadcast(inverse) + broadcast(shift)) - bit_cast<uint32_t>(shift);
    store_bytes(code, codes + i * kLanes);
    sums += code;
  }
  const uint32_t sum = total(sums);  // unsigned: where x is not finite, the codes are anything
  return {scale, scale * static_cast<float>(static_cast<int32_t>(sum)), static_cast<int32_t>(0u - kCodeOffset * sum)};
}

template <class X>
void code_row(const X* x, int64_t size, int8_t* codes, RowGroup* groups) {
  for (int64_t k = 0; k < size; k += kGroup) *groups++ = code_group(x + k, std::min(kGroup, size - k), codes + k);
}

}  // namespace
}  // namespace quire_gemm
