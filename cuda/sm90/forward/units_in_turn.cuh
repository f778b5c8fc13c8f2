// Lets blocks take units in turn, by a counter (QueryTileSchedule::divide()).
#pragma once

#include <cstdint>

#include "ptx/atomic.cuh"
#include "sm90/forward/schedule.cuh"

namespace jax_flash::sm90 {

// Advances the cursor of a kernel that has a counter. Called by a whole warp, one lane of which
// `leads`.
template <typename Plan>
__device__ __forceinline__ void advance_in_turn(QueryTileCursor& cursor, const Plan& plan,
                                                bool leads) {
  const int32_t unit = cursor.unit;
  cursor.advance();
  if (plan.in_turn && cursor.unit != unit) {
    const int32_t taken = leads ? ptx::atomic_increment(plan.workspace.counter) : 0;
    cursor.unit = plan.schedule.blocks + __shfl_sync(0xffffffff, taken, 0);
  }
}

}  // namespace jax_flash::sm90
