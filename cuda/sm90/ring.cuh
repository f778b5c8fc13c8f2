// Defines the state of a ring of stages in shared memory, which producers fill and consumers empty
// in turn.
#pragma once

#include <cstdint>

// If 1, all threads of a warp arrive at a barrier; otherwise one arrives for the warp. The
// racecheck of compute-sanitizer does not follow a __syncwarp() before an arrival
// (tests/sanitize.py).
#ifndef JAX_FLASH_EVERY_THREAD_ARRIVES
#define JAX_FLASH_EVERY_THREAD_ARRIVES 0
#endif

namespace jax_flash::sm90 {

inline constexpr int kWarpArrivals = JAX_FLASH_EVERY_THREAD_ARRIVES ? 32 : 1;

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
