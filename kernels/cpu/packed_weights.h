// Weights in panels, as the products of gemm.cpp and gemm_codes.cpp take them.
#pragma once

#include <cstdint>

namespace quire_gemm {

// Mirrored by `_Descriptor` in linear.py.
struct PackedWeight {
  void* panels;
  const float* bias;  // [padded N] or null
  int64_t in_features;
  int64_t out_features;
  int64_t dtype;  // 0 bfloat16, 1 float16, 2 float32
};

// Mirrored by `_Descriptor` in coded.py.
struct CodedWeight {
  void* panels;
  const float* bias;  // [padded N] or null
  int64_t in_features;
  int64_t out_features;
  int64_t bits;  // 4: codes 0 .. 15, with minima; 8: codes -127 .. 127
};

}  // namespace quire_gemm
