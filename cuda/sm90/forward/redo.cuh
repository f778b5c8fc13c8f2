// Marks query tiles that the sm_90 forward kernel must redo after all others of a block
// (sm90/forward/order_redo.cuh). Without modifiers, sums are examined only after a query tile's
// last key.
//
// The running maximum is the greatest logit of a row's first keys, so exponentials of later logits
// may become very large. bfloat16 and float32 hold them up to 2^127; float16, in tiles whose values
// are converted, up to 2^16 (sm90/forward/values.cuh). The loop assumes that they stay in this
// range. A check in each tile would lengthen the critical path (TUNING.md, "Peaked logits", "Short
// calls").
#pragma once

#include <cstdint>

#include "plan/modifiers.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/schedule.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// True for kernels that examine sums only after the last key. If keys are divided, running maxima
// rise with each greater logit instead.
template <typename Config, uint32_t kModifiers>
inline constexpr bool kChecksLate =
    kModifiers == kNoModifier && Config::kOptimistic && Config::kKeyGroups == 1;

// Returns whether a query tile must be redone, given the sums and the output of one warp. An
// infinite P or value makes the output of its row, or some of it, infinite or NaN. A thread's sum
// that is not 0 must be at least `least`.
template <int kOutN>
__device__ __forceinline__ bool must_redo(const OnlineSoftmax<1>& softmax,
                                          const float (&out)[1][kOutN][4], float least) {
  float zero[4] = {};  // becomes NaN if an element is infinite or NaN
#pragma unroll
  for (const auto& block : out[0]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) zero[e] = fmaf(block[e], 0.0f, zero[e]);
  }
  const bool finite = (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0.0f;
  const float sum = fmaxf(softmax.sum[0][0], softmax.sum[0][1]);
  const auto low = [&](float x) { return x > 0.0f && x < least; };
  const bool small = low(softmax.sum[0][0]) || low(softmax.sum[0][1]);
  return __any_sync(0xffffffff, !finite || sum > kPeakLimit || small);
}

struct QueryTilesToRedo {
  uint32_t tiles;  // a bit for each of the block's query tiles, modulo 32
  uint64_t found;  // a barrier: each warp that marks tiles arrives when it has finished

  __device__ __forceinline__ uint32_t barrier() const { return ptx::shared_address(&found); }
  __device__ __forceinline__ void init(int warps) {
    tiles = 0;
    ptx::mbarrier_init(barrier(), warps);
  }
  // Marks the n-th tile for redo. Called by a warp.
  __device__ __forceinline__ void add(uint32_t n) { add_some(1u << n % 32); }
  __device__ __forceinline__ void add_all() { add_some(~0u); }
  // Signals that the calling warp has finished all of its tiles.
  __device__ __forceinline__ void notify() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier());
  }
  // Waits for all warps, and returns the tiles that they have marked.
  __device__ __forceinline__ uint32_t wait() const {
    ptx::mbarrier_wait_asleep(barrier(), 0);
    return *const_cast<const volatile uint32_t*>(&tiles);
  }

 private:
  __device__ __forceinline__ void add_some(uint32_t bits) {
    if (threadIdx.x % 32 == 0) atomicOr(&tiles, bits);
  }
};

}  // namespace jax_flash::sm90
