// LogitModifiers on whole tiles of a warp: what apply() does, a feature at a time. Neighbours are
// loaded together, and a feature that a call lacks costs one branch a tile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "tile/logits.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

// Rows and columns that exist. Elements beyond are taken from the last: what becomes of them does
// not matter, but there is nothing to read.
struct Extent {
  int32_t rows, cols;

  __device__ __forceinline__ bool contains(int32_t row_end, int32_t col_end) const {
    return row_end <= rows && col_end <= cols;
  }
};

// Calls body(n, half, first, second) with the elements of an array under each pair of fragment
// elements, `data` being at row 0 and column 0 of the operand's batch and head.
template <typename T, int kN, typename Body>
__device__ __forceinline__ void for_pairs(const T* data, int64_t row_stride, int64_t col_stride,
                                          int32_t row0, int32_t col0, const Extent& extent,
                                          Body body) {
  struct alignas(2 * sizeof(T)) Pair {
    T first, second;
  };
  const bool together = col_stride == 1 && row_stride % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(data) % sizeof(Pair) == 0 &&
                        extent.contains(row0 + 16, col0 + kN * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* row = data + min(row0 + fragment_row(0, 2 * half), extent.rows - 1) * row_stride;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int32_t col = col0 + fragment_col(n, 0);
      if (together) {
        const Pair pair = *reinterpret_cast<const Pair*>(row + col);
        body(n, half, pair.first, pair.second);
      } else {
        body(n, half, row[min(col, extent.cols - 1) * col_stride],
             row[min(col + 1, extent.cols - 1) * col_stride]);
      }
      // No more loads in flight than registers for them.
      if (n % 4 == 3) asm volatile("" ::: "memory");
    }
  }
}

inline constexpr float kTanhRange = 0.75f;

// Whether logits are to be in natural units: the softmax scales products otherwise, which it can by
// a positive factor only.
__host__ __device__ __forceinline__ bool has_natural_logits(const Forward& params) {
  const Options& options = params.options;
  return params.bias || options.logits_soft_cap > 0.0f || !(options.scale > 0.0f);
}
// Whether they may forbid single elements.
__device__ __forceinline__ bool has_element_masks(const Forward& params) {
  return params.mask || params.query_segment_ids;
}

// Replaces logits / cap by logits after the soft cap.
template <int kN>
__device__ __forceinline__ void soft_cap_ratios(float (&ratios)[1][kN][4], float cap) {
  float greatest = 0.0f;  // fmaxf passes over NaN, and so does the polynomial
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) greatest = fmaxf(greatest, fabsf(ratios[0][n][e]));
  }
  if (__all_sync(0xffffffff, greatest <= kTanhRange)) {  // most tiles
    // tanh(x) / x for |x| <= kTanhRange, as a polynomial in x^2: tanh within 4e-8, without a
    // special function. Fitted by Chebyshev interpolation.
    constexpr int kTerms = 6;
    const float factor[kTerms] = {0.999999986f * cap,  -0.333330298f * cap, 0.133261829f * cap,
                                  -0.053377547f * cap, 0.019643430f * cap,  -0.004756069f * cap};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& ratio = ratios[0][n][e];
        const float square = ratio * ratio;
        float sum = factor[kTerms - 1];
#pragma unroll
        for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, factor[i]);
        ratio *= sum;
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) ratios[0][n][e] = cap * tanh_accurate(ratios[0][n][e]);
    }
  }
}

template <int kN>
__device__ __forceinline__ void soft_cap(float (&logits)[1][kN][4], float cap) {
  const float inverse = 1.0f / cap;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) logits[0][n][e] *= inverse;
  }
  soft_cap_ratios(logits, cap);
}

// Turns a warp's products into logits, -inf where not allowed, but for the band: in natural units
// if has_natural_logits(), else unscaled. `one_segment`: all ids of the tile's rows and columns are
// equal.
template <int kN>
__device__ __forceinline__ void modify_scores(float (&scores)[1][kN][4], const Forward& params,
                                              int32_t batch, int32_t head, const Band& band,
                                              int32_t row0, int32_t col0, bool one_segment) {
  const Options& options = params.options;
  const bool by_segment = params.query_segment_ids && !one_segment;
  const Extent extent = {band.q_len, band.kv_len};
  const BatchIndex index(params.shape, batch);
  if (params.bias) {
    const float scale = options.scale;
    const int64_t bias0 = index.offset(params.bias) + head * params.bias.head;
    const auto add = [&](const auto* data) {
      for_pairs<std::remove_cvref_t<decltype(*data)>, kN>(
          data + bias0, params.bias.row, params.bias.col, row0, col0, extent,
          [&](int n, int half, auto first, auto second) {
            float& x = scores[0][n][2 * half];
            float& y = scores[0][n][2 * half + 1];
            x = fmaf(x, scale, to_float(first));
            y = fmaf(y, scale, to_float(second));
          });
    };
    switch (params.bias.dtype) {
      case DType::kFloat32: add(static_cast<const float*>(params.bias.data)); break;
      case DType::kBFloat16: add(static_cast<const __nv_bfloat16*>(params.bias.data)); break;
      case DType::kFloat16: add(static_cast<const __half*>(params.bias.data)); break;
    }
  }
  const bool capped = options.logits_soft_cap > 0.0f;
  if (capped || (!params.bias && !(options.scale > 0.0f))) {
    const float cap = options.logits_soft_cap;
    const float scale = params.bias ? 1.0f : options.scale;
    const float factor = capped ? scale / cap : scale;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][n][e] *= factor;
    }
    if (capped) soft_cap_ratios(scores, cap);
  }
  if (params.mask) {
    for_pairs<uint8_t, kN>(index.pointer<const uint8_t>(params.mask, head), params.mask.row,
                           params.mask.col, row0, col0, extent,
                           [&](int n, int half, uint8_t first, uint8_t second) {
                             if (!first) scores[0][n][2 * half] = minus_infinity();
                             if (!second) scores[0][n][2 * half + 1] = minus_infinity();
                           });
  }
  if (by_segment) {
    int32_t ids[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(row0 + fragment_row(0, 2 * half), extent.rows - 1);
      ids[half] = index.pointer<const int32_t>(
          params.query_segment_ids)[row * params.query_segment_ids.row];
    }
    for_pairs<int32_t, kN>(index.pointer<const int32_t>(params.key_value_segment_ids), 0,
                           params.key_value_segment_ids.row, row0, col0, extent,
                           [&](int n, int half, int32_t first, int32_t second) {
                             if (first != ids[half]) scores[0][n][2 * half] = minus_infinity();
                             if (second != ids[half]) {
                               scores[0][n][2 * half + 1] = minus_infinity();
                             }
                           });
  }
}

}  // namespace jax_flash
