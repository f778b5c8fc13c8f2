// Adds dS to the gradient of a bias in the float32 kernels that compute dQ. They hold dS in
// accumulator fragments of S.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "modifiers/bias_gradient.cuh"
#include "params.h"
#include "ptx/global.cuh"
#include "status.h"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Returns whether such a kernel adds dS to the bias's gradient. The gradient is float32, and
// clear_bias_gradient() has set it to zero. The sums then depend on the order of blocks, so
// deterministic calls do not use this. For other gradients, modifiers/bias_gradient.cuh computes dS
// once more.
__host__ __device__ __forceinline__ bool adds_bias_gradient(const Backward& params) {
  const Operand& dbias = params.dbias;
  return dbias && dbias.dtype == DType::kFloat32 && dbias.row != 0 && dbias.col == 1 &&
         !params.options.deterministic;
}

// Clears the bias's gradient, if adds_bias_gradient().
inline Status clear_bias_gradient(const Backward& params, cudaStream_t stream) {
  if (!adds_bias_gradient(params)) return {};
  const BiasOwnership size(params.shape, params.dbias);
  const int64_t elements = size.owned * size.owned_heads * params.shape.q_len * params.shape.kv_len;
  const cudaError_t error = cudaMemsetAsync(params.dbias.data, 0, elements * 4, stream);
  if (error == cudaSuccess) return {};
  return Status::internal(std::string("jax_flash: cannot clear the bias's gradient: ") +
                          cudaGetErrorString(error));
}

// Returns the call without a gradient of the bias that such a kernel has computed.
inline Backward without_added_bias_gradient(const Backward& params) {
  Backward rest = params;
  if (adds_bias_gradient(params)) rest.dbias = {};
  return rest;
}

// Adds a warp's dS to the bias's gradient, if adds_bias_gradient(). Element [0, 0] of dS belongs to
// query row0 and key col0 of the head.
template <int kM, int kN>
__device__ __forceinline__ void add_bias_gradient(const Backward& params, const BatchIndex& batch,
                                                  int32_t head, int32_t row0, int32_t col0,
                                                  const float (&dscores)[kM][kN][4]) {
  if (!adds_bias_gradient(params)) return;
  const Operand& dbias = params.dbias;
  const Shape& shape = params.shape;
  float* const first = batch.pointer<float>(dbias, head);
  [[maybe_unused]] const bool in_pairs =
      reinterpret_cast<uintptr_t>(first) % 8 == 0 && dbias.row % 2 == 0 && shape.kv_len % 2 == 0;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + fragment_row(m, 2 * half);
      if (row >= shape.q_len) continue;
      float* const to = first + row * dbias.row;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int32_t col = col0 + fragment_col(n, 0);
        const float x = dscores[m][n][2 * half], y = dscores[m][n][2 * half + 1];
#if __CUDA_ARCH__ >= 900
        if (in_pairs) {
          if (col < shape.kv_len) ptx::red_add_v2_f32(to + col, x, y);
          continue;
        }
#endif
        if (col < shape.kv_len) ptx::red_add_f32(to + col, x);
        if (col + 1 < shape.kv_len) ptx::red_add_f32(to + col + 1, y);
      }
    }
  }
}

}  // namespace jax_flash
