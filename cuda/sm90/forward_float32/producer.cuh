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
    work.places = Float32Places(params, BatchIndex(q.batch_axes));
    work.head = q.head;
    work.bad = plan.workspace.bad + plan.first_tile(q);
    return work;
  }

  // Passes a description to consumers.
  __device__ __forceinline__ void pass(const Float32Work& work) {
    ptx::mbarrier_wait_asleep(smem.query_empty(query_stage.stage), query_stage.parity ^ 1);
    smem.works[query_stage.stage] = work;
    ptx::mbarrier_arrive(smem.query_full(query_stage.stage));
    query_stage.advance();
  }

  // Copies the keys and values of a step. `first`: the head's first tile in the workspace.
  __device__ __forceinline__ void load(int64_t first, int32_t step, bool last) {
    const int32_t tile = step * Config::kTiles;
    const int32_t found = min(plan.workspace.tiles - tile, Config::kTiles);  // tiles that exist
    const uint32_t bits_bytes = found * static_cast<uint32_t>(sizeof(KeyBits));
    await_empty();
    auto& keys = smem.keys[slot.stage];
    keys.tile = step;
    keys.last = last;
    if (found < Config::kTiles) keys.bits[Config::kTiles - 1] = {};  // nobody attends to others
    copy(plan.workspace.key, first + tile, found, bits_bytes);
    ptx::cp_async_bulk_load(ptx::shared_address(keys.bits), plan.workspace.bits + first + tile,
                            bits_bytes, smem.full(slot.stage));
    slot.advance();
    await_empty();
    copy(plan.workspace.value, first + tile, found, 0);
    slot.advance();
  }
  __device__ __forceinline__ void await_empty() const {
    ptx::mbarrier_wait_asleep(smem.empty(slot.stage), slot.parity ^ 1);
    ptx::fence_proxy_async_shared();  // consumers load magnitudes and bits
  }
  // Copies tiles from the one with this index on to the slot, whose barrier then expects them and
  // `more_bytes`. A tile that does not exist is replaced by the first.
  __device__ __forceinline__ void copy(const float* tiles, int64_t index, int32_t found,
                                       uint32_t more_bytes) const {
    constexpr int kPanels = Config::kTiles == 1 ? 1 : Config::Tile::kPanels;
    constexpr int kPieceBytes = Config::kTileBytes / Config::kTiles / kPanels;
    const uint32_t full = smem.full(slot.stage);
    const auto to = smem.tile(slot.stage);
    ptx::mbarrier_arrive_expect_tx(full, Config::kTileBytes + Config::kBlockKv * 4 + more_bytes);
#pragma unroll
    for (int tile = 0; tile < Config::kTiles; ++tile) {
      const float* from = tiles + (index + (tile < found ? tile : 0)) * Config::kTileFloats;
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        ptx::cp_async_bulk_load(to.root + to.offset + (panel * Config::kTiles + tile) * kPieceBytes,
                                from + panel * (kPieceBytes / 4), kPieceBytes, full);
      }
      ptx::cp_async_bulk_load(ptx::shared_address(smem.magnitudes[slot.stage] + tile * kTileRows),
                              from + kPanels * (kPieceBytes / 4), kTileRows * 4, full);
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
      // Returns the last step before `end` with keys that some query may attend to, or less than
      // range.first.
      const auto last_before = [&](int32_t end) {
        constexpr int32_t kTiles = Config::kTiles;
        const int32_t tile = last_key_tile(plan.workspace.bits + first, range.first * kTiles,
                                           min(end * kTiles, plan.workspace.tiles));
        return tile < range.first * kTiles ? range.first - 1 : tile / kTiles;
      };
      int32_t step = last_before(range.end);
      work.has_keys = step >= range.first;
      if (leads) pass(work);
      while (step >= range.first) {
        const int32_t next = last_before(step);
        if (leads) load(first, step, next < range.first);
        step = next;
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
