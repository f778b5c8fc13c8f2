// Starts the copies of K, V and, tile by tile, of Q with lse and of dO with delta for the consumers
// of a backward kernel whose thread block owns keys. One producer warp does so. It fills a ring of
// two stages: it waits for a stage's empty barrier, and the copies complete the full barrier. lse
// belongs to the barrier of Q, delta to that of dO.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/bias.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/smem.cuh"
#include "tile/batch_index.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Starts the copy of a block's K or V. Called by one thread.
template <typename Tile>
__device__ __forceinline__ void load_keys(const Tile& tile, const CUtensorMap& map,
                                          uint32_t barrier_smem, const Operand& operand,
                                          const BatchIndex& batch, int32_t kv_head, int32_t col0) {
  ptx::mbarrier_arrive_expect_tx(barrier_smem, Tile::kBytes);
  load_panels(tile, map, barrier_smem, operand, batch, kv_head, col0);
}

// Starts the copies of K and V for the thread block's first key block, before that is described.
template <typename Config>
__device__ __forceinline__ void load_first_keys(const Backward& params, const BlockPlan& plan,
                                                const TileSchedule& schedule,
                                                const BackwardMaps& maps,
                                                const BackwardSmem<Config>& smem) {
  int32_t unit, tile;
  schedule.at(plan.split.block_of(static_cast<int32_t>(blockIdx.x)), unit, tile);
  const HeadIndex index = plan.units.at(unit);
  const BatchIndex batch = index.batch_index();
  const int32_t col0 = tile * Config::kBlockKv;
  const int32_t kv_head = plan.split.sharing.quotient(index.head);
  load_keys(smem.key(), maps.key, smem.key_full(), params.key, batch, kv_head, col0);
  load_keys(smem.value(), maps.value, smem.value_full(), params.value, batch, kv_head, col0);
}

// Returns how many rows of a tile have an lse and a delta in the workspace: all of them, unless a
// head has a single tile.
template <typename Config>
__device__ __forceinline__ int32_t statistics_rows(const BackwardWorkspace& workspace) {
  return min(workspace.rows, Config::kBlockQ);
}

// Writes lse and delta of the remaining rows, which no copy writes. Called by 256 threads, from
// thread 128 on.
template <typename Config>
__device__ __forceinline__ void fill_statistics(const BackwardWorkspace& workspace,
                                                const BackwardSmem<Config>& smem) {
  const int32_t rows = statistics_rows<Config>(workspace);
  if (rows == Config::kBlockQ) return;
  for (int i = threadIdx.x - 128; i < Config::kStages * Config::kBlockQ; i += 256) {
    if (i % Config::kBlockQ < rows) continue;
    smem.lse[i] = -minus_infinity();
    smem.delta[i] = 0.0f;
  }
}

// Starts the copy of a tile's Q, and announces the bytes of Q and lse. The caller then starts the
// copy of lse. Called by one thread.
template <typename Config>
__device__ __forceinline__ void load_query(const Backward& params, const BackwardMaps& maps,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem, uint32_t stage,
                                           const BackwardBlock& block, const HeadTile& at) {
  const int32_t row0 = at.tile * Config::kBlockQ;
  smem.tiles[stage] = {row0, at.head};
  ptx::mbarrier_arrive_expect_tx(
      smem.query_full(stage), Config::QueryTile::kBytes + statistics_rows<Config>(workspace) * 4);
  load_panels(smem.query(stage), maps.query, smem.query_full(stage), params.query, block.batch,
              at.head, row0);
}

// Starts the copies for all query tiles of a block. kSeveral: other blocks may follow, and
// consumers know how many tiles each has; else a tile of row -1 marks the end. `begun`: the copies
// of K, V and the first Q have been started.
template <bool kSeveral, bool kOrdered, typename Config, typename Maps>
__device__ __forceinline__ void load_tiles(const Backward& params, const Maps& maps,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem,
                                           const BackwardBlock& block, bool begun,
                                           uint32_t key_parity, StagePair& next) {
  const uint32_t statistics_bytes = statistics_rows<Config>(workspace) * 4;
  const bool leader = threadIdx.x == 0;
  const BatchIndex& batch = block.batch;
  const QueryTileWalk& walk = block.walk;
  HeadTile at = walk.begin();
  if (leader && block.tile_count == 0) {  // consumers expect the barriers' phases
    if (!begun) {
      ptx::mbarrier_wait(smem.keys_empty(), key_parity ^ 1);
      ptx::mbarrier_arrive(smem.key_full());
      ptx::mbarrier_arrive(smem.value_full());
    }
    if (kSeveral) ptx::mbarrier_arrive(smem.block_wanted());
  }
  // If tiles are skipped, the walk needs all lanes, and each vote keeps them with the leader.
  // Otherwise the other lanes return: they would run through the whole loop before the leader has
  // its first tile, which takes issue slots and 230 clocks a tile.
  if (!leader && walk.query_spans == nullptr) return;
  for (int32_t left = block.tile_count; left > 0;
       --left, walk.template advance<Config::kBlockQ, kOrdered>(at), next.advance()) {
    if (leader) {
      const bool first = left == block.tile_count;
      const int32_t row0 = at.tile * Config::kBlockQ;
      const int64_t row_index = block.batch_head(params.shape, at.head) * workspace.rows + row0;
      const uint32_t stage = next.stage();
      const uint32_t query_full = smem.query_full(stage), dout_full = smem.dout_full(stage);
      if (!first || !begun) {
        ptx::mbarrier_wait(smem.query_empty(stage), next.parity() ^ 1);
        ptx::fence_proxy_async_shared();
        load_query(params, maps, workspace, smem, stage, block, at);
      }
      const int32_t col0 = block.kv_tile * Config::kBlockKv;
      if (first) {
        if (!begun) {
          ptx::mbarrier_wait(smem.keys_empty(), key_parity ^ 1);
          ptx::fence_proxy_async_shared();
          load_keys(smem.key(), maps.key, smem.key_full(), params.key, batch, block.kv_head, col0);
        }
        ptx::griddepcontrol_wait();  // for lse and delta
        // For head dims above 128, the second kernel reads them, too, without waiting for them: it
        // may start from here on.
        ptx::griddepcontrol_launch_dependents();
      }
      ptx::cp_async_bulk_load(ptx::shared_address(smem.lse + stage * Config::kBlockQ),
                              workspace.lse_log2 + row_index, statistics_bytes, query_full);
      if (first && !begun) {  // after Q, K and lse: the first product needs no V
        load_keys(smem.value(), maps.value, smem.value_full(), params.value, batch, block.kv_head,
                  col0);
      }
      ptx::mbarrier_wait(smem.dout_empty(stage), next.parity() ^ 1);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive_expect_tx(dout_full, Config::OutTile::kBytes + statistics_bytes);
      load_panels(smem.dout(stage), maps.dout, dout_full, params.dout, batch, at.head, row0);
      ptx::cp_async_bulk_load(ptx::shared_address(smem.delta + stage * Config::kBlockQ),
                              workspace.delta + row_index, statistics_bytes, dout_full);
      if constexpr (Config::kHasBias) {
        load_bias(maps, smem, block, at.head, row0, col0, next);
      }
      if (kSeveral && left == min(block.tile_count, kTilesAhead)) {
        ptx::mbarrier_arrive(smem.block_wanted());
      }
    }
  }
  if (leader && !kSeveral) {
    ptx::mbarrier_wait(smem.query_empty(next.stage()), next.parity() ^ 1);
    smem.tiles[next.stage()] = {-1, 0};
    ptx::mbarrier_arrive(smem.query_full(next.stage()));
  }
}

}  // namespace jax_flash::sm90
