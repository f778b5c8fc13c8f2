// Describes the key block that a thread block of a backward kernel works on. In the kernel of
// narrow.cuh, one warp chooses the key blocks and hands their descriptions to the other warps,
// through a ring of two in shared memory.
#pragma once

#include <cstdint>

#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/ends.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/backward/split.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Describes a key block: a key tile, and the query tiles of its heads that may attend to it. It is
// kept in shared memory, because the warps that copy have few registers.
struct BackwardBlock {
  BatchIndex batch;
  Band band;
  QueryTileWalk walk;
  int32_t kv_head, kv_tile, batch_index;  // kv_tile is -1 after the last block
  int32_t unit;                           // of heads: see BackwardCounters
  int32_t tile_count;
  bool ascending;  // lower keys take their turns first
  AlikeRows alike;
  SplitSum sum;

  // Describes the block at `place` of the schedule. Called by a whole warp. kSkips: calls may have
  // segments. kByMask: skips the query tiles that the mask rules out.
  template <typename Config, bool kSkips, bool kByMask = false>
  static __device__ __forceinline__ BackwardBlock at(const Backward& params, const BlockPlan& plan,
                                                     const TileSchedule& schedule, int32_t place,
                                                     const SegmentSpans& spans, TurnOrder order) {
    int32_t unit, kv_tile;
    const int32_t section = schedule.at(place, unit, kv_tile);
    const int32_t col0 = kv_tile * Config::kBlockKv, group = plan.group;
    const HeadIndex index = plan.units.at(unit);
    const int32_t batch_index = index.batch, first_head = index.head * group;
    const BatchIndex batch = index.batch_index();
    const Band band = plan.band_of(params, batch);
    QueryTileWalk walk{q_tiles<Config::kBlockQ>(band, col0, col0 + Config::kBlockKv), first_head,
                       first_head + group};
    if (kByMask && plan.mask_rows.ranges != nullptr) {
      walk.range = plan.mask_rows.narrow<Config::kBlockQ>(walk.range, index.batch_axes, first_head,
                                                          group, kv_tile);
    }
    AlikeRows alike;
    if (kSkips && spans.query && order == TurnOrder::kNone) {
      alike = walk.skip_segments<Config::kBlockQ>(
          spans.query + int64_t{batch_index} * spans.query_blocks, spans.query_blocks,
          tile_span<Config::kBlockKv, true>(spans.key + int64_t{batch_index} * spans.key_blocks,
                                            spans.key_blocks, kv_tile));
    }
    const bool full = is_rectangle(band), together = order == TurnOrder::kTogether;
    walk.backward = together && !full && section % 2 != 0;
    int32_t shift = 0;
    if (walk.backward) shift = walk.range.end - 1 - walk.range.first;
    if (together && full) shift = shifted_start<Config::kBlockKv>(band, walk.range, kv_tile);
    walk.start_at<Config::kBlockQ>(shift);
    return {batch,
            band,
            walk,
            plan.split.sharing.quotient(index.head),
            kv_tile,
            batch_index,
            unit,
            walk.count<Config::kBlockQ>(),
            walk.backward || order == TurnOrder::kAscending,
            alike,
            {}};
  }
  __device__ __forceinline__ void restrict_to(int32_t first, int32_t end) {
    if (end > first) walk.skip(first);
    tile_count = end - first;
  }
  // Returns the number of a query head among those of all batches.
  __device__ __forceinline__ int64_t batch_head(const Shape& shape, int32_t head) const {
    return int64_t{batch_index} * shape.heads + head;
  }
};

// The next block is chosen when this many tiles of the current one have still to be copied. Until
// then, any other thread block may take it, so that all end at about the same time.
inline constexpr int kTilesAhead = 3;

// Prefetches K and V of a block to L2: shared memory has no room for them until the block before
// has ended.
template <typename Config>
__device__ __forceinline__ void prefetch_keys(const Backward& params, const BackwardMaps& maps,
                                              const BackwardBlock& block) {
  const int32_t row0 = block.kv_tile * Config::kBlockKv;
#pragma unroll
  for (int panel = 0; panel < Config::KeyTile::kPanels; ++panel) {
    prefetch_box(maps.key, params.key, block.batch, block.kv_head, row0, panel * 64);
    if (panel < Config::ValueTile::kPanels) {
      prefetch_box(maps.value, params.value, block.batch, block.kv_head, row0, panel * 64);
    }
  }
}

// Chooses the thread block's key blocks and hands them to the other warps, except the first, which
// has index blockIdx.x. Converts dQ while it waits: until the next block is wanted, or the last has
// ended.
template <typename Config, typename Element, bool kGeneral, bool kOrdered>
__device__ __forceinline__ void choose_blocks(const Backward& params, const BackwardMaps& maps,
                                              const BlockPlan& plan,
                                              const BackwardWorkspace& workspace,
                                              const TileSchedule& schedule, TurnOrder order,
                                              const BackwardSmem<Config>& smem) {
  const bool leader = threadIdx.x % 32 == 0;
  constexpr bool kMayShare = !kOrdered, kMaySplit = !kGeneral && !kOrdered;
  constexpr bool kByMask = Config::kSkipsByMask && !kOrdered;
  const int32_t blocks = schedule.tiles * schedule.total_heads;
  const auto end = static_cast<uint32_t>(kMaySplit ? plan.split.end(blocks) : blocks);
  const BackwardCounters counters{workspace.counters, schedule.total_heads};
  EndWarp<Config, Element, kOrdered> ends{plan.ends, workspace};
  constexpr bool kMayConvert = !kGeneral && !(kOrdered && Config::kOrderedSums > 1);
  const bool converts = kMayConvert && plan.ends.blocks > 0;
  if (converts) ptx::griddepcontrol_wait();
  // Returns the next index. In ordered runs, no thread block may have two blocks of a section (see
  // TurnOrder), so the index advances by the size of the grid.
  const auto next = [&](uint32_t index) {
    if (gridDim.x >= end) return end;
    if (order != TurnOrder::kNone) return index + gridDim.x;
    uint32_t taken = 0;
    if (leader) {
      ptx::griddepcontrol_wait();  // for the zeroed counter
      taken = static_cast<uint32_t>(atomicAdd(counters.taken(), 1));
    }
    return __shfl_sync(0xffffffff, taken, 0) + gridDim.x;
  };
  uint32_t index = blockIdx.x;
  int32_t left = 0;  // tiles left of a chunk
  StagePair at;
  while (true) {
    const bool last = index >= end;  // the last block is being computed
    const uint32_t awaited = last ? smem.block_empty(at.stage()) : smem.block_wanted();
    const uint32_t parity = last ? at.parity() ^ 1 : at.count & 1;
    if (converts) {
      ends.work_until(awaited, parity);
    } else {
      ptx::mbarrier_wait_asleep(awaited, parity);
    }
    __syncwarp();
    if (last) return ends.finish();
    at.advance();
    const bool takes = left == 0;
    if (takes) index = next(index);
    if (index >= end) {
      ptx::mbarrier_wait_asleep(smem.block_empty(at.stage()), at.parity() ^ 1);
      if (leader) {
        smem.blocks[at.stage()].kv_tile = -1;
        ptx::mbarrier_arrive(smem.block_full(at.stage()));
      }
      if (!converts) return;
      at.advance();
      continue;
    }
    auto place = static_cast<int32_t>(index);
    if constexpr (kMaySplit) {
      if (takes) left = plan.split.tiles_end(place);
      place = plan.split.block_of(place, left);
    }
    auto block = BackwardBlock::at < Config, kGeneral || Config::kHasSegments,
         kByMask > (params, plan, schedule, place, workspace.spans, order);
    if constexpr (kMayShare) {
      divide<kMaySplit>(plan.split, static_cast<int32_t>(index), left, block);
    }
    ptx::mbarrier_wait_asleep(smem.block_empty(at.stage()), at.parity() ^ 1);
    if (leader) {
      smem.blocks[at.stage()] = block;
      ptx::mbarrier_arrive(smem.block_full(at.stage()));
      prefetch_keys<Config>(params, maps, block);
    }
    const uint32_t zeroed = index + plan.zeros.ahead;
    if (plan.zeros.ahead > 0 && takes && zeroed < static_cast<uint32_t>(blocks)) {
      write_zeros(counters, plan.zeros, workspace.dquery,
                  static_cast<int32_t>(zeroed) / schedule.tiles,
                  static_cast<int32_t>(zeroed) % schedule.tiles);
    }
  }
}

// Calls f(block, parity) for each block that choose_blocks() hands over. `parity` is that of the
// barriers of its K and V.
template <typename Config, typename Function>
__device__ __forceinline__ void for_blocks(const BackwardSmem<Config>& smem, const Function& f) {
  for (StagePair at;; at.advance()) {
    ptx::mbarrier_wait(smem.block_full(at.stage()), at.parity());
    const BackwardBlock& block = smem.blocks[at.stage()];
    if (__reduce_max_sync(0xffffffff, block.kv_tile) < 0) break;
    f(block, at.count & 1);
    sync_and_arrive_warp(smem.block_empty(at.stage()));
  }
}

}  // namespace jax_flash::sm90
