// Defines the state of a ring of stages in shared memory, which producers fill and consumers empty
// in turn.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

// If 1, all threads of a warp arrive at a barrier; otherwise one arrives for the warp. The
// racecheck of compute-sanitizer does not follow a __syncwarp() before an arrival
// (tests/sanitize.py).
#ifndef JAX_FLASH_EVERY_THREAD_ARRIVES
#define JAX_FLASH_EVERY_THREAD_ARRIVES 0
#endif

namespace jax_flash::sm90 {

inline constexpr int kWarpArrivals = JAX_FLASH_EVERY_THREAD_ARRIVES ? 32 : 1;

// Arrives for a whole warp whose threads are known to have done their work.
__device__ __forceinline__ void arrive_warp(uint32_t barrier_smem) {
  if (kWarpArrivals > 1 || threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier_smem);
}

// Arrives for a whole warp: all that its threads have done happens before a wait for the barrier
// returns.
__device__ __forceinline__ void sync_and_arrive_warp(uint32_t barrier_smem) {
  __syncwarp();
  arrive_warp(barrier_smem);
}

// Holds a stage of a ring, and the parity of its barriers' current phase.
template <int kStages>
struct RingState {
  uint32_t stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int count) {
    if (count == 1) return advance();
    stage += count;
    parity ^= stage / kStages & 1;
    stage %= kStages;
  }
  __device__ __forceinline__ RingState next(int count) const {
    RingState state = *this;
    state.advance(count);
    return state;
  }
};

}  // namespace jax_flash::sm90
