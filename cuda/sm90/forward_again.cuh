// Query tiles that the sm_90 forward kernel does again, after all others of a block: where sums are
// looked at only behind the last key (ScoresAhead::kOneCutCheckedLate).
//
// Exponentials relative to a reference that is the greatest logit of a row's first keys may become
// very great, and bfloat16 and float32 hold them all the same, up to 2^100. So a loop without
// branches takes it that they do. A look in each tile, and what follows from it, stands between the
// instructions that a short call waits for (TUNING.md, "Short calls").
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/schedule.cuh"

namespace jax_flash::sm90 {

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
