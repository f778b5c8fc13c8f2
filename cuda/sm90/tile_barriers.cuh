// Defines the barriers of forward kernels whose producer warp describes query tiles and copies
// tiles of K and V.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "sm90/ring.cuh"

namespace jax_flash::sm90 {

// Gives the addresses of a block's barriers. A `full` barrier completes its phase when a stage has
// been filled, an `empty` one when every consumer warp has finished with the stage. A stage of
// queries holds a description of a query tile and, if the producer copies it, Q. K and V have a
// ring each, or take the stages of one ring in turn.
template <int kQueryStages, int kRings, int kStages, int kConsumers>
struct TileBarriers {
  static constexpr int kCount = 2 * kQueryStages + 2 * kRings * kStages;
  static constexpr uint32_t kArrivals = kConsumers * 4 * kWarpArrivals;
  uint32_t barriers;

  __device__ __forceinline__ explicit TileBarriers(uint32_t address) : barriers(address) {}

  __device__ __forceinline__ uint32_t query_full(uint32_t stage) const {
    return barriers + stage * 8;
  }
  __device__ __forceinline__ uint32_t query_empty(uint32_t stage) const {
    return barriers + (kQueryStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t full(uint32_t stage, int ring = 0) const {
    return at(2 * ring, stage);
  }
  __device__ __forceinline__ uint32_t empty(uint32_t stage, int ring = 0) const {
    return at(2 * ring + 1, stage);
  }

  __device__ __forceinline__ void init_barriers() const {
    for (uint32_t stage = 0; stage < kQueryStages; ++stage) {
      ptx::mbarrier_init(query_full(stage), 1);
      ptx::mbarrier_init(query_empty(stage), kArrivals);
    }
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      for (int ring = 0; ring < kRings; ++ring) {
        ptx::mbarrier_init(full(stage, ring), 1);
        ptx::mbarrier_init(empty(stage, ring), kArrivals);
      }
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t at(uint32_t kind, uint32_t stage) const {
    return barriers + (2 * kQueryStages + kind * kStages + stage) * 8;
  }
};

}  // namespace jax_flash::sm90
