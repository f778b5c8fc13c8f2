// Adds up dq of the parts of units, after the kernel of gradient.cuh.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "sm80/decode/call.cuh"
#include "tile/batch_index.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

inline constexpr int kDqueryWarps = 8;

// The grid is the units'. The warps divide the parts, and a lane has four columns of each 128.
__global__ void __launch_bounds__(kDqueryWarps * 32)
    decode_dquery_kernel(const __grid_constant__ DecodeCall call,
                         const __grid_constant__ Backward params) {
  __shared__ __align__(16) float sums[kDqueryWarps][kDecodeMaxHeadDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const DecodeParts& parts = call.parts;
  const DecodeUnit unit(params.shape, parts, static_cast<int32_t>(blockIdx.x));
  const BatchIndex batch(call.batch_axes, unit.batch);
  float* dquery = batch.pointer<float>(params.dquery, unit.kv_head);
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_wait();  // until the previous kernel has stored the parts
#endif
  const float* first = parts.values + int64_t{blockIdx.x} * parts.parts.divisor * parts.pitch;
  for (int32_t col = lane * 4; col < params.shape.head_dim; col += 128) {
    float4 sum = {};
#pragma unroll 8
    for (int32_t part = warp; part < parts.parts.divisor; part += kDqueryWarps) {
      add_scaled(sum, 1.0f,
                 *reinterpret_cast<const float4*>(first + int64_t{part} * parts.pitch + col));
    }
    *reinterpret_cast<float4*>(&sums[warp][col]) = sum;
  }
  __syncthreads();
  for (int32_t col = threadIdx.x; col < params.shape.head_dim; col += kDqueryWarps * 32) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kDqueryWarps; ++i) sum += sums[i][col];
    dquery[col] = sum;
  }
}

}  // namespace jax_flash::sm80
