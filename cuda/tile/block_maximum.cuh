// Finds the greatest number that threads of a block hold.
#pragma once

#include <cstdint>

namespace jax_flash {

// Returns the greatest `x` of all threads. No x is negative. Called once by all threads, in whole
// warps.
__device__ __forceinline__ float block_maximum(float x) {
  constexpr int kMostWarps = 32;
  __shared__ float of_warps[kMostWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) x = fmaxf(x, of_warps[warp]);
  return x;
}

}  // namespace jax_flash
