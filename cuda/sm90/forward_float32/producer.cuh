// Implements the producer warp of Hopper's forward kernel for float32: it describes query tiles to
// consumers, and copies tiles of K and V from the last key tile of each query tile to the first.
#pragma once

#include <cstdint>

#include "modifiers/sinks.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward/units_in_turn.cuh"
#include "sm90/forward_float32/config.cuh"
#include "sm90/forward_float32/plan.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"

namespace jax_flash::sm90 {

template <typename Config, bool kGeneral>
struct Float32Producer {
  const Forward& params;
  const Float32Plan& plan;
  const Float32Smem<Config>& smem;
  RingState<Config::kQueryStages> query_stage;
  RingState<Config::kSlots> slot;

  __device__ __forceinline__ Float32Work describe(const QueryTileIndex& q) const {
    Float32Work work;
    work.row0 = q.tile * Config::kBlockQ;
    work.band = plan.band.of<false>(q.batch_axes);
    work.query = plan.query.at<const float>(q, 0) + work.row0 * plan.query.row;
    work.out = plan.out.at<float>(q, 0) + work.row0 * plan.out.row;
    work.lse = plan.lse.at<float>(q, work.row0);
    work.sink = read_sink(plan.sinks.data != nullptr, plan.sinks.at<const float>(q, 0),
                          !kGeneral || !in_natural_units(params));
    if constexpr (kGeneral) {
      work.places = Float32Places(params, BatchIndex(q.batch_axes));
      work.head = q.head;
      work.bad = plan.workspace.bad + plan.first_tile(q);
    }
    return work;
  }

  // Passes a description to consumers.
  __device__ __forceinline__ void pass(const Float32Work& work) {
    ptx::mbarrier_wait_asleep(smem.query_empty(query_stage.stage), query_stage.parity ^ 1);
    smem.works[query_stage.stage] = work;
    ptx::mbarrier_arrive(smem.query_full(query_stage.stage));
    query_stage.advance();
  }

  // Copies a tile of K and V. `index`: of the tile in the workspace.
  __device__ __forceinline__ void load(int64_t index, int32_t tile, bool last) {
    const int64_t offset = index * Config::kTileFloats;
    await_empty();
    Float32Keys& keys = smem.keys[slot.stage];
    keys.tile = tile;
    keys.last = last;
    copy(plan.workspace.key + offset, smem.key(slot.stage), sizeof(KeyBits));
    ptx::cp_async_bulk_load(ptx::shared_address(&keys.bits), plan.workspace.bits + index,
                            sizeof(KeyBits), smem.full(slot.stage));
    slot.advance();
    await_empty();
    copy(plan.workspace.value + offset, smem.value(slot.stage), 0);
    slot.advance();
  }
  __device__ __forceinline__ void await_empty() const {
    ptx::mbarrier_wait_asleep(smem.empty(slot.stage), slot.parity ^ 1);
  }
  // Copies a tile to the slot, whose barrier then expects the tile and `more_bytes`.
  template <typename Tile>
  __device__ __forceinline__ void copy(const float* from, const Tile& to,
                                       uint32_t more_bytes) const {
    const uint32_t full = smem.full(slot.stage);
    constexpr int kMagnitudeBytes = Config::kSplit ? kSplitRows * 4 : 0;
    ptx::mbarrier_arrive_expect_tx(full, Tile::kBytes + kMagnitudeBytes + more_bytes);
    ptx::cp_async_bulk_load(to.root + to.offset, from, Tile::kBytes, full);
    if constexpr (Config::kSplit) {
      ptx::cp_async_bulk_load(ptx::shared_address(smem.magnitudes[slot.stage]),
                              from + Tile::kBytes / 4, kMagnitudeBytes, full);
    }
  }

  // Processes all query tiles of the block. Called by one warp, whose first lane starts the copies.
  __device__ __forceinline__ void run() {
    const bool leads = threadIdx.x % 32 == 0;
    ptx::griddepcontrol_wait();
    QueryTileCursor cursor{plan.schedule};
    while (cursor.valid()) {
      const QueryTileIndex q = cursor.index();
      Float32Work work = describe(q);
      const int64_t first = plan.first_tile(q);
      const Range range =
          kv_tiles<Config::kBlockKv>(work.band, work.row0, work.row0 + Config::kBlockQ);
      const auto last_before = [&](int32_t end) {
        return last_key_tile(plan.workspace.bits + first, range.first, end);
      };
      int32_t tile = last_before(range.end);
      work.has_keys = tile >= range.first;
      if (leads) pass(work);
      while (tile >= range.first) {
        const int32_t next = last_before(tile);
        if (leads) load(first + tile, tile, next < range.first);
        tile = next;
      }
      __syncwarp();
      advance_in_turn(cursor, plan, leads);
    }
    Float32Work end = {};
    end.row0 = -1;
    if (leads) pass(end);
  }
};

}  // namespace jax_flash::sm90
