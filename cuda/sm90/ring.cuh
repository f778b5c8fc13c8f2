// Places in shared memory that are filled and emptied in turn.
#pragma once

#include <cstdint>

namespace jax_flash::sm90 {

// A stage of a ring, and the parity of the phase of its barriers that is in use.
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
