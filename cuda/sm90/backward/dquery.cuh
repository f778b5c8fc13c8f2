// Adds dQ to float32 sums in global memory. A consumer stages dQ of a query tile in shared memory
// and notifies its warp, and a thread of the warp starts a bulk reduction (cp.reduce.async.bulk).
// When the copy has read shared memory, the warp releases the stage.
//
// In deterministic runs, key blocks add to a query tile in a fixed order. A flag of each tile holds
// the current turn: a warp waits for its turn, and then sets the flag to the next one. The block of
// turn 0 stores its dQ instead of adding, so that the sums need no zeros.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/smem.cuh"
#include "tile/band.cuh"

namespace jax_flash::sm90 {

// Describes the place of a consumer's dQ of a tile in the sums, and its turn there.
struct DqueryTile {
  uint32_t row = 0;   // first row, in the sums of all heads
  int32_t lanes = 0;  // lanes that have places there: see dquery_lanes()
  uint32_t flag = 0;  // index of the flag that holds the current turn
  int32_t turn = 0;   // turn of this block

  template <bool kOrdered, typename Config>
  static __device__ __forceinline__ DqueryTile at(const Shape& shape,
                                                  const BackwardWorkspace& workspace,
                                                  const BackwardBlock& block,
                                                  const HeadTile& cursor, int group) {
    const int32_t row0 = cursor.tile * Config::kBlockQ;
    const int32_t own_row0 = Config::kDqueryByRows ? row0 + group * 64 : row0;
    const auto head = static_cast<uint32_t>(block.batch_head(shape, cursor.head));
    DqueryTile tile;
    tile.row = head * static_cast<uint32_t>(workspace.dquery_rows) + own_row0;
    tile.lanes = dquery_lanes(shape.q_len, own_row0);
    if constexpr (kOrdered) {
      tile.flag = head * static_cast<uint32_t>(workspace.flags) + cursor.tile * Config::kConsumers;
      const auto turn = [&](auto sums) {
        return turn_of<sums>(block.band, block.ascending, block.kv_tile, cursor.tile,
                             block.walk.range.end,
                             kv_tiles<Config::kBlockKv>(block.band, row0, row0 + Config::kBlockQ));
      };
      constexpr std::integral_constant<int, Config::kOrderedSums> kSeveral;
      constexpr std::integral_constant<int, 1> kOne;
      const bool several = Config::kOrderedSums > 1 && workspace.odd_dquery != nullptr;
      tile.turn = several ? turn(kSeveral) : turn(kOne);
    }
    return tile;
  }
  __device__ __forceinline__ DqueryTile of_lane(int lane) const {
    return {__shfl_sync(0xffffffff, row, lane), __shfl_sync(0xffffffff, lanes, lane),
            __shfl_sync(0xffffffff, flag, lane), __shfl_sync(0xffffffff, turn, lane)};
  }
};

// Starts to add staged dQ of a tile to its sums, or to store it there. This takes one copy if all
// lanes have places, else one for each block of 8 columns. Called by one thread.
__device__ __forceinline__ void copy_dquery(bool stores, float* sums, uint32_t staged_smem,
                                            int32_t lanes, int32_t col_blocks) {
  const bool whole = lanes == 128;
  const uint32_t bytes = lanes * 16 * (whole ? col_blocks : 1);
  if (bytes == 0) return;
#pragma unroll 1
  for (int32_t i = 0; i < (whole ? 1 : col_blocks); ++i) {
    if (stores) {
      ptx::cp_async_bulk_store(sums + i * lanes * 4, staged_smem + i * 2048, bytes);
    } else {
      ptx::cp_reduce_async_bulk_add_f32(sums + i * lanes * 4, staged_smem + i * 2048, bytes);
    }
  }
}

// If the plan has other thread blocks zero the sums of this unit, waits until they have. Called by
// one thread.
__device__ __forceinline__ void await_zeros(const BackwardCounters& counters, const BlockPlan& plan,
                                            const BackwardBlock& block, int32_t key_tiles) {
  if (block.unit < plan.zeros.first_unit) return;
  while (ptx::ld_acquire(counters.zeroed(block.unit)) != key_tiles) continue;
  ptx::fence_proxy_async_global();
}

// Does the work of add_dquery() for consumers that stage dQ in two pieces, one after the other in
// the same memory: columns [64 group, 64 group + 64), then [128 + 32 group, 128 + 32 group + 32).
template <typename Config>
__device__ __forceinline__ void add_dquery_in_pieces(const Backward& params,
                                                     const BackwardWorkspace& workspace,
                                                     const BackwardSmem<Config>& smem,
                                                     const BlockPlan& plan, int32_t key_tiles,
                                                     int32_t total_units,
                                                     const BackwardBlock& block, int group) {
  const bool leader = threadIdx.x % 32 == 0;
  const int32_t head_dim = params.shape.head_dim;
  const BackwardCounters counters{workspace.counters, total_units};
  HeadTile cursor = block.walk.begin();
  if (leader) await_zeros(counters, plan, block, key_tiles);
  for (int32_t left = block.tile_count; left > 0; --left) {
    const auto tile = DqueryTile::at<false, Config>(params.shape, workspace, block, cursor, group);
    block.walk.template advance<Config::kBlockQ>(cursor);
    float* const sums = workspace.dquery + int64_t{tile.row} * head_dim;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const int32_t blocks = 8 >> piece;  // of 8 columns
      const int32_t first_block = piece * 16 + group * blocks;
      ptx::barrier_sync(kDqueryFull + group * 2 + piece, 128 + 32);
      if (leader) {
        ptx::fence_proxy_async_shared();
        copy_dquery(false, sums + first_block * tile.lanes * 4, smem.staging(group), tile.lanes,
                    min(max(head_dim / 8 - first_block, 0), blocks));
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read<0>();
        ptx::mbarrier_arrive(smem.dquery_empty(group, piece));
      }
      __syncwarp();
    }
  }
  if (leader && plan.ends.blocks > 0) {
    ptx::cp_async_bulk_wait_group<0>();
    ptx::red_release_add(counters.added(block.unit), plan.split.chunks > 0 ? block.tile_count : 1);
  }
}

// Adds a consumer's dQ of all query tiles to the sums. Each consumer has a separate warp for this,
// and a tile has a flag for each consumer, so that no warp waits for the other consumer's dQ or
// turns. The latency from one turn to the next bounds ordered runs. Therefore the lanes compute the
// places and turns of 32 tiles at a time, and the next flag is read while the copy runs.
template <bool kOrdered, typename Config>
__device__ __forceinline__ void add_dquery(const Backward& params,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem, const BlockPlan& plan,
                                           int32_t key_tiles, int32_t total_units,
                                           const BackwardBlock& block, int group, StagePair& next) {
  const int lane = threadIdx.x % 32, count = block.tile_count;
  const bool leader = lane == 0;
  const QueryTileWalk& walk = block.walk;
  const auto tile_at = [&](const HeadTile& cursor) {
    return DqueryTile::at<kOrdered, Config>(params.shape, workspace, block, cursor, group);
  };
  const bool odd =
      kOrdered && workspace.odd_dquery != nullptr && block.kv_tile % Config::kOrderedSums != 0;
  float* const dquery = odd ? workspace.odd_dquery : workspace.dquery;
  int32_t* const flags = workspace.turns + group + (odd ? workspace.flags / 2 : 0);
  const int32_t head_dim = params.shape.head_dim;
  // The blocks of 8 columns before this consumer's, and the number of its own.
  const int32_t first_block = Config::kDqueryByRows ? 0 : group * (Config::kDqueryGroupCols / 8);
  const int32_t col_blocks = min(max(head_dim / 8 - first_block, 0), Config::kDqueryGroupCols / 8);
  HeadTile cursor = walk.begin();
  DqueryTile tiles;   // of 32 tiles, that of this lane
  int32_t turn = -1;  // flag's value when last read
  const BackwardCounters counters{workspace.counters, total_units};
  if (!kOrdered && leader) await_zeros(counters, plan, block, key_tiles);
  for (int32_t index = 0; index < count; ++index, next.advance()) {
    DqueryTile tile;
    if constexpr (kOrdered) {
      if (index % 32 == 0) tiles = tile_at(walk.at(index + lane));
      tile = tiles.of_lane(index % 32);
      if (leader) {
        while (turn != tile.turn) turn = ptx::ld_relaxed(flags + tile.flag);
        ptx::fence_acquire();
        ptx::fence_proxy_async_global();
      }
    } else {
      tile = tile_at(cursor);
      walk.template advance<Config::kBlockQ>(cursor);
    }
    __syncwarp();
    const int stage = next.stage();
    const uint32_t staged = smem.dquery_staging(group, stage);
    float* const sums = dquery + int64_t{tile.row} * head_dim + first_block * tile.lanes * 4;
    ptx::barrier_sync(kDqueryFull + group * 2 + stage, 128 + 32);
    if (leader) {
      ptx::fence_proxy_async_shared();
      copy_dquery(kOrdered && tile.turn == 0, sums, staged, tile.lanes, col_blocks);
      ptx::cp_async_bulk_commit_group();
    }
    __syncwarp();
    if constexpr (kOrdered) {
      const int following = (index + 1) % 32;
      const uint32_t flag = __shfl_sync(0xffffffff, tiles.flag, following);
      if (leader) {
        turn = following != 0 && index + 1 < count ? ptx::ld_relaxed(flags + flag) : -1;
        ptx::cp_async_bulk_wait_group_read<0>();
        ptx::mbarrier_arrive(smem.dquery_empty(group, stage));
        ptx::cp_async_bulk_wait_group<0>();
        ptx::st_release(flags + tile.flag, tile.turn + 1);
      }
    } else if (Config::kStagingStages == 1) {
      if (leader) {
        ptx::cp_async_bulk_wait_group_read<0>();
        ptx::mbarrier_arrive(smem.dquery_empty(group, stage));
      }
    } else if (leader) {
      ptx::cp_async_bulk_wait_group_read<1>();
      if (index > 0) ptx::mbarrier_arrive(smem.dquery_empty(group, stage ^ 1));
      if (index + 1 == count) {  // dK and dV may be staged next
        ptx::cp_async_bulk_wait_group_read<0>();
        ptx::mbarrier_arrive(smem.dquery_empty(group, stage));
      }
    }
    __syncwarp();
  }
  if (leader && plan.ends.blocks > 0) {
    ptx::cp_async_bulk_wait_group<0>();
    ptx::red_release_add(counters.added(block.unit), plan.split.chunks > 0 ? count : 1);
  }
}

}  // namespace jax_flash::sm90
