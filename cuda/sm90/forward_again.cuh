// Query tiles that the sm_90 forward kernel does again, after all others of a block: without
// modifiers, up to head dim 128, sums are looked at only behind the last key.
//
// Exponentials relative to a reference that is the greatest logit of a row's first keys may become
// very great, and bfloat16 and float32 hold them all the same, up to 2^127. So a loop takes it that
// they do. A look in each tile, and what follows from it, stands between the instructions that a
// call waits for (TUNING.md, "Peaked logits", "Short calls").
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/config.cuh"
#include "sm90/forward_modified.cuh"
#include "sm90/forward_peaks.cuh"
#include "sm90/schedule.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Which kernels do. Where keys are divided, each warpgroup looks at its sums in each tile.
template <typename Config, uint32_t kModifiers>
inline constexpr bool kChecksLate =
    kModifiers == kNoModifier && Config::kOptimistic && Config::kKeyGroups == 1;

// Of a thread's sum in a row. Up to that, exponentials are numbers of the operands' type, and the
// output is finite for values up to 2^107.
template <typename Element>
inline constexpr float kGreatestSum = std::is_same_v<Element, __half> ? 60000.0f : 0x1p20f;

// Whether a query tile is to be done again, by the sums of one of its warps.
template <typename Element>
__device__ __forceinline__ bool sums_exceed(const OnlineSoftmax<1>& softmax) {
  return __any_sync(0xffffffff,
                    fmaxf(softmax.sum[0][0], softmax.sum[0][1]) > kGreatestSum<Element>);
}

// The same by sums and output, where references are guessed: sums are often greater than that.
template <typename Element, int kOutN>
__device__ __forceinline__ bool sums_exceed(const OnlineSoftmax<1>& softmax,
                                            const float (&out)[1][kOutN][4]) {
  if (!sums_exceed<Element>(softmax)) return false;
  if constexpr (std::is_same_v<Element, __half>) return true;
  bool fails = fmaxf(softmax.sum[0][0], softmax.sum[0][1]) > kPeakLimit;
#pragma unroll
  for (const auto& block : out[0]) {
#pragma unroll
    for (const float value : block) fails |= !(fabsf(value) < INFINITY);
  }
  return __any_sync(0xffffffff, fails);
}

struct QueryTilesAgain {
  uint32_t tiles;  // a bit for each of the block's, modulo 32
  uint64_t found;  // a barrier: every consumer warp has done with its tiles, and said which

  __device__ __forceinline__ uint32_t barrier() const { return ptx::shared_address(&found); }
  __device__ __forceinline__ void init(int consumer_warps) {
    tiles = 0;
    ptx::mbarrier_init(barrier(), consumer_warps);
  }
  // By a consumer's warp: the n-th tile is to be done again.
  __device__ __forceinline__ void add(uint32_t n) {
    if (threadIdx.x % 32 == 0) atomicOr(&tiles, 1u << n % 32);
  }
  // By a consumer's warp: that it has done with all of its tiles.
  __device__ __forceinline__ void tell() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier());
  }
  // What all have told.
  __device__ __forceinline__ uint32_t wait() const {
    ptx::mbarrier_wait_asleep(barrier(), 0);
    return *const_cast<const volatile uint32_t*>(&tiles);
  }
};

}  // namespace jax_flash::sm90
