// Adds a bias to logits in accumulator fragments of S = Q K^T or of S^T = K Q^T. The gradient of
// the bias is that of the logits, summed in modifiers/bias_gradient.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "modifiers/pairs.cuh"
#include "params.h"
#include "ptx/movmatrix.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Loads an element of an array whose type is known only at run time.
__device__ __forceinline__ float load_float(const Operand& operand, int64_t index) {
  switch (operand.dtype) {
    case DType::kBFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(operand.data)[index]);
    case DType::kFloat16: return __half2float(static_cast<const __half*>(operand.data)[index]);
    case DType::kFloat32: break;
  }
  return static_cast<const float*>(operand.data)[index];
}

// Calls body(data) with the bias's elements from index `offset` on, as a pointer of their type.
template <typename Body>
__device__ __forceinline__ void with_bias(const Operand& bias, int64_t offset, Body body) {
  switch (bias.dtype) {
    case DType::kFloat32: body(static_cast<const float*>(bias.data) + offset); break;
    case DType::kBFloat16: body(static_cast<const __nv_bfloat16*>(bias.data) + offset); break;
    case DType::kFloat16: body(static_cast<const __half*>(bias.data) + offset); break;
  }
}

// Calls body(float_of); float_of converts an element of type `dtype` that was read as an integer.
template <typename Body>
__device__ __forceinline__ void with_bias_words(DType dtype, Body body) {
  switch (dtype) {
    case DType::kBFloat16: return body([](uint32_t word) { return __uint_as_float(word << 16); });
    case DType::kFloat16:
      return body([](uint32_t word) {
        return __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
      });
    default: return body([](uint32_t word) { return __uint_as_float(word); });
  }
}

// Multiplies products by `scale` and adds the bias of one batch and head. Its element [0, 0] has
// index `offset`.
template <int kInFlight, int kN>
__device__ __forceinline__ void add_bias(float (&scores)[1][kN][4], const Operand& bias,
                                         int64_t offset, float scale, int32_t row0, int32_t col0,
                                         const Extent& extent) {
  with_bias(bias, offset, [&](const auto* data) {
    for_pairs<std::remove_cvref_t<decltype(*data)>, kInFlight, kN>(
        data, bias.row, bias.col, row0, col0, extent,
        [&](int n, int half, auto first, auto second) {
          float& x = scores[0][n][2 * half];
          float& y = scores[0][n][2 * half + 1];
          x = fmaf(x, scale, to_float(first));
          y = fmaf(y, scale, to_float(second));
        });
  });
}

// Does the same element by element, for a bias whose keys are contiguous. For code where few tiles
// need the bias.
template <typename Bias, int kN>
__device__ __forceinline__ void add_elements(float (&scores)[kN][4], const Bias* bias,
                                             int64_t row_stride, float scale, int32_t row0,
                                             int32_t col0, const Extent& extent) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Bias* row = bias + min(row0 + fragment_row(0, 2 * half), extent.rows - 1) * row_stride;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int32_t col = min(col0 + fragment_col(n, e), extent.cols - 1);
        float& score = scores[n][2 * half + e];
        score = fmaf(score, scale, to_float(row[col]));
      }
    }
  }
}

// Adds a bias of 16-bit elements whose keys are contiguous to fragments of S^T. It is read by rows
// of queries, two keys at a time, and transposed in registers: reads of single elements would be
// twice as many.
template <typename Bias, int kN>
__device__ __forceinline__ void add_rows(float (&scores)[kN][4], const Bias* bias,
                                         int64_t row_stride, int32_t key0, int32_t row0) {
  const Bias* from = bias + (row0 + fragment_row(0, 0)) * row_stride + key0 + fragment_col(0, 0);
  uint32_t pairs[kN][2];
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pairs[n][half] = *reinterpret_cast<const uint32_t*>(from + n * 8 * row_stride + half * 8);
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = ptx::movmatrix_trans(pairs[n][half]);
      Bias values[2];
      memcpy(values, &both, 4);
      scores[n][2 * half] += to_float(values[0]);
      scores[n][2 * half + 1] += to_float(values[1]);
    }
  }
}

// Adds the bias to fragments of S^T, whose rows are keys from key0 on and whose columns are queries
// from row0 on, without a scale. kManyRegisters: more elements are loaded at the same time.
template <bool kManyRegisters, int kN>
__device__ __forceinline__ void add_bias_transposed(float (&scores)[kN][4], const Operand& bias,
                                                    int64_t offset, int32_t key0, int32_t row0,
                                                    const Extent& extent) {
  with_bias(bias, offset, [&](const auto* data) {
    using Bias = std::remove_cvref_t<decltype(*data)>;
    if constexpr (kManyRegisters && sizeof(Bias) == 2) {
      const bool in_pairs = bias.col == 1 && bias.row % 2 == 0 &&
                            reinterpret_cast<uintptr_t>(data) % 4 == 0 &&
                            extent.contains(key0 + 16, row0 + 8 * kN);
      if (__all_sync(0xffffffff, in_pairs)) return add_rows(scores, data, bias.row, key0, row0);
    }
    for_pairs<Bias, kManyRegisters ? 8 : 4, kN>(data, bias.col, bias.row, key0, row0, extent,
                                                [&](int n, int half, auto first, auto second) {
                                                  scores[n][2 * half] += to_float(first);
                                                  scores[n][2 * half + 1] += to_float(second);
                                                });
  });
}

}  // namespace jax_flash
