// Moves query tiles to the consumers of a backward kernel whose block owns keys, and moves dQ away
// from them. Defines what a block works on, its shared memory, and the warps that start the copies.
//
// A proxy fence separates ordinary accesses to shared memory from those of copies and products. The
// thread that starts the copies or products executes it, after the barrier that orders the two, in
// the same block: the memory model asks for one fence on the way (Lustig, Cooksey, Giroux, ISCA
// 2022). In front of the barrier, where it is often seen, all threads would wait for their own
// accesses: 600 clocks a tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/segments.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/ends.cuh"
#include "sm90/backward/parts.cuh"
#include "sm90/backward/split.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

struct BackwardBlock;

// Holds the addresses of tiles, row statistics and barriers in shared memory.
template <typename Config>
struct BackwardSmem {
  uint32_t root;      // base of the tiles
  uint32_t barriers;  // four single ones, then two or kStages of each other kind
  float* lse;         // [kStages][kBlockQ]
  float* delta;       // [kStages][kBlockQ]
  int2* tiles;        // [kStages]: a tile's first row and its head; if there is a single key block,
                      // a row of -1 after the last tile
  BackwardBlock* blocks;  // [2], or [1] if there is a single one

  __device__ __forceinline__ typename Config::KeyTile key() const { return {root, 0}; }
  __device__ __forceinline__ typename Config::KeyTile value() const {
    return {root, Config::kValueOffset};
  }
  __device__ __forceinline__ typename Config::QueryTile query(uint32_t stage) const {
    return {root, Config::kQueryOffset + stage * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::QueryTile dout(uint32_t stage) const {
    return {root, Config::kOutOffset + stage * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::ScoreTile score(uint32_t stage) const {
    return {root, Config::kScoreOffset + stage * Config::ScoreTile::kBytes};
  }
  // Returns the address of staged sums: dQ of a warpgroup, or P^T of a stage.
  __device__ __forceinline__ uint32_t staging(int index) const {
    return root + Config::kStagingOffset + index * Config::kStagingBytes;
  }
  __device__ __forceinline__ uint32_t key_full() const { return barriers; }
  __device__ __forceinline__ uint32_t value_full() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t keys_empty() const { return barriers + 16; }  // and values
  // Signals that the next block may be chosen.
  __device__ __forceinline__ uint32_t block_wanted() const { return barriers + 24; }
  __device__ __forceinline__ uint32_t block_full(uint32_t stage) const {
    return barriers + 32 + stage * 8;
  }
  __device__ __forceinline__ uint32_t block_empty(uint32_t stage) const {
    return barriers + 48 + stage * 8;
  }
  __device__ __forceinline__ uint32_t query_full(uint32_t stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t query_empty(uint32_t stage) const { return at(1, stage); }
  __device__ __forceinline__ uint32_t dout_full(uint32_t stage) const { return at(2, stage); }
  __device__ __forceinline__ uint32_t dout_empty(uint32_t stage) const { return at(3, stage); }

  // Is empty when staged dQ has been copied; a consumer has two stages of it. The other kernel has
  // no such barriers, but the next two kinds instead.
  __device__ __forceinline__ uint32_t dquery_empty(int group, uint32_t stage) const {
    return at(4 + group, stage);
  }
  // Is full when P^T has been staged by one consumer for the other, in the kernel that has it.
  __device__ __forceinline__ uint32_t staging_full(uint32_t stage) const { return at(4, stage); }
  __device__ __forceinline__ uint32_t staging_empty(uint32_t stage) const { return at(5, stage); }

  static constexpr int kBarriers = 8 + 6 * Config::kStages;
  // Initializes all barriers. One thread of a warp does it: several lanes take longer.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerArrivals = Config::kConsumers * 4 * kWarpArrivals;
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int index = 0; index < kBarriers; ++index) {
      const int kind = (index - 8) / Config::kStages;
      int arrivals = 1;
      if (index == 2) arrivals = kConsumerArrivals;
      // The warps that copy and that add dQ arrive too.
      if (index == 6 || index == 7) arrivals = kConsumerArrivals + 3 * kWarpArrivals;
      if (index >= 8 && (kind == 1 || kind == 3)) arrivals = kConsumerArrivals;
      if (index >= 8 && kind >= 4) arrivals = Config::kStagingArrivals;
      ptx::mbarrier_init(barriers + index * 8, arrivals);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t at(uint32_t kind, uint32_t stage) const {
    return barriers + 64 + (kind * Config::kStages + stage) * 8;
  }
};

// Describes what a thread block works on at a time: a key tile, and the query tiles of its group of
// heads. It is kept in shared memory, since the warps that copy have few registers.
struct BackwardBlock {
  BatchIndex batch;
  Band band;
  QueryTileWalk walk;
  int32_t kv_head, kv_tile, batch_index;  // kv_tile is -1 after the last block
  int32_t tile_count;
  bool ascending;  // blocks of lower keys take their turns before this one
  SplitSum sum;

  // Describes the block at `place` of the schedule. Called by a whole warp. kByMask: skips the
  // query tiles that the mask rules out.
  template <typename Config, bool kGeneral, bool kByMask = false>
  static __device__ __forceinline__ BackwardBlock at(const Backward& params, const BlockPlan& plan,
                                                     const TileSchedule& schedule, int32_t place,
                                                     const SegmentSpans& spans, TurnOrder order) {
    int32_t batch_kv_head, kv_tile;
    const int32_t section = schedule.at(place, batch_kv_head, kv_tile);
    const int32_t col0 = kv_tile * Config::kBlockKv, group = plan.group;
    const HeadIndex index = plan.kv_heads.at(batch_kv_head);
    const int32_t batch_index = index.batch, kv_head = index.head;
    const BatchIndex batch = index.batch_index();
    const Band band = plan.band_of(params, batch);
    QueryTileWalk walk{q_tiles<Config::kBlockQ>(band, col0, col0 + Config::kBlockKv),
                       kv_head * group, kv_head * group + group};
    if (kByMask && plan.mask_rows.ranges != nullptr) {
      walk.range = plan.mask_rows.narrow<Config::kBlockQ>(walk.range, index.batch_axes,
                                                          kv_head * group, group, kv_tile);
    }
    if (kGeneral && spans.query && order == TurnOrder::kNone) {
      walk.query_blocks = spans.query_blocks;
      walk.query_spans = spans.query + int64_t{batch_index} * spans.query_blocks;
      walk.key_span = tile_span<Config::kBlockKv>(
          spans.key + int64_t{batch_index} * spans.key_blocks, spans.key_blocks, kv_tile);
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
            kv_head,
            kv_tile,
            batch_index,
            walk.count<Config::kBlockQ>(),
            walk.backward || order == TurnOrder::kAscending,
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

// The next block is chosen when so many tiles of the current one have still to be copied. Until
// then any other thread block may take it, so that all end at about the same time.
inline constexpr int kTilesAhead = 3;

// Hands blocks to the other warps, except the launch's first, which has index blockIdx.x. Converts
// dQ until the next block is wanted, or the last has ended.
template <typename Config, typename Element, bool kGeneral, bool kOrdered>
__device__ __forceinline__ void choose_blocks(const Backward& params, const BlockPlan& plan,
                                              const BackwardWorkspace& workspace,
                                              const TileSchedule& schedule, TurnOrder order,
                                              const BackwardSmem<Config>& smem) {
  const bool leader = threadIdx.x % 32 == 0;
  constexpr bool kMaySplit = !kGeneral && !kOrdered, kByMask = kGeneral && !kOrdered;
  const int32_t blocks = schedule.tiles * schedule.total_heads;
  const auto end = static_cast<uint32_t>(kMaySplit ? plan.split.end(blocks) : blocks);
  const BackwardCounters counters{workspace.counters, plan.ends.kv_heads};
  EndWarp<Config, Element, kOrdered> ends{plan.ends, workspace};
  constexpr bool kMayConvert = !kGeneral && !(kOrdered && Config::kOrderedSums > 1);
  const bool converts = kMayConvert && plan.ends.blocks > 0;
  if (converts) ptx::griddepcontrol_wait();
  // In ordered runs no thread block may have two blocks of a section: see TurnOrder.
  const auto next = [&](uint32_t index) {
    if (gridDim.x >= end) return end;
    if (order != TurnOrder::kNone) return index + gridDim.x;
    uint32_t taken = 0;
    if (leader) {
      ptx::griddepcontrol_wait();  // for the counter's initial value
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
    auto block = BackwardBlock::at<Config, kGeneral, kByMask>(params, plan, schedule, place,
                                                              workspace.spans, order);
    if constexpr (kMaySplit) divide(plan.split, static_cast<int32_t>(index), left, block);
    ptx::mbarrier_wait_asleep(smem.block_empty(at.stage()), at.parity() ^ 1);
    if (leader) {
      smem.blocks[at.stage()] = block;
      ptx::mbarrier_arrive(smem.block_full(at.stage()));
    }
    const uint32_t zeroed = index + plan.zeros.ahead;
    if (plan.zeros.ahead > 0 && takes && zeroed < static_cast<uint32_t>(blocks)) {
      write_zeros(counters, plan.zeros, workspace.dquery,
                  static_cast<int32_t>(zeroed) / schedule.tiles,
                  static_cast<int32_t>(zeroed) % schedule.tiles);
    }
  }
}

// Calls f(block, parity) for each block; the parity is that of the barriers of its K and V.
template <typename Config, typename Function>
__device__ __forceinline__ void for_blocks(const BackwardSmem<Config>& smem, const Function& f) {
  for (StagePair at;; at.advance()) {
    ptx::mbarrier_wait(smem.block_full(at.stage()), at.parity());
    const BackwardBlock& block = smem.blocks[at.stage()];
    if (__reduce_max_sync(0xffffffff, block.kv_tile) < 0) break;
    f(block, at.count & 1);
    arrive_by_warp(smem.block_empty(at.stage()));
  }
}

// Starts copying K or V of a block. Called by one thread.
template <typename Tile>
__device__ __forceinline__ void load_keys(const Tile& tile, const CUtensorMap& map,
                                          uint32_t barrier_smem, const Operand& operand,
                                          const BatchIndex& batch, int32_t kv_head, int32_t col0) {
  ptx::mbarrier_arrive_expect_tx(barrier_smem, Tile::kBytes);
  load_tile_panels(tile, map, barrier_smem, operand, batch, kv_head, col0);
}

// Starts copying K and V of the thread block's first block, before that is described.
template <typename Config>
__device__ __forceinline__ void load_first_keys(const Backward& params, const BlockPlan& plan,
                                                const TileSchedule& schedule,
                                                const BackwardMaps& maps,
                                                const BackwardSmem<Config>& smem) {
  int32_t batch_kv_head, tile;
  schedule.at(plan.split.block_of(static_cast<int32_t>(blockIdx.x)), batch_kv_head, tile);
  const HeadIndex index = plan.kv_heads.at(batch_kv_head);
  const BatchIndex batch = index.batch_index();
  const int32_t col0 = tile * Config::kBlockKv;
  load_keys(smem.key(), maps.key, smem.key_full(), params.key, batch, index.head, col0);
  load_keys(smem.value(), maps.value, smem.value_full(), params.value, batch, index.head, col0);
}

// Returns how many rows of a tile have an lse and a delta in the workspace: all, unless each head
// has a single tile.
template <typename Config>
__device__ __forceinline__ int32_t statistics_rows(const BackwardWorkspace& workspace) {
  return min(workspace.rows, Config::kBlockQ);
}

// Writes lse and delta of the other rows, which no copy writes. Called by 256 threads, from thread
// 128 on.
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

// Starts copying Q of a tile; its lse follows. Called by one thread.
template <typename Config>
__device__ __forceinline__ void load_query(const Backward& params, const BackwardMaps& maps,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem, uint32_t stage,
                                           const BackwardBlock& block, const HeadTile& at) {
  const int32_t row0 = at.tile * Config::kBlockQ;
  smem.tiles[stage] = {row0, at.head};
  ptx::mbarrier_arrive_expect_tx(
      smem.query_full(stage), Config::QueryTile::kBytes + statistics_rows<Config>(workspace) * 4);
  load_tile_panels(smem.query(stage), maps.query, smem.query_full(stage), params.query, block.batch,
                   at.head, row0);
}

// Starts the copies for all query tiles of a block. kSeveral: other blocks may follow, and the
// consumers know the number of tiles of each. `begun`: the copies of K, V and the first Q have been
// started.
template <bool kSeveral, bool kOrdered, typename Config>
__device__ __forceinline__ void load_tiles(const Backward& params, const BackwardMaps& maps,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem,
                                           const BackwardBlock& block, bool begun,
                                           uint32_t key_parity, StagePair& next) {
  const uint32_t statistics_bytes = statistics_rows<Config>(workspace) * 4;
  const bool leader = threadIdx.x == 0;
  const BatchIndex& batch = block.batch;
  const QueryTileWalk& walk = block.walk;
  HeadTile at = walk.begin();
  if (leader && block.tile_count == 0) {  // the barriers' phases advance all the same
    if (!begun) {
      ptx::mbarrier_wait(smem.keys_empty(), key_parity ^ 1);
      ptx::mbarrier_arrive(smem.key_full());
      ptx::mbarrier_arrive(smem.value_full());
    }
    if (kSeveral) ptx::mbarrier_arrive(smem.block_wanted());
  }
  // If tiles are skipped, the other lanes are needed, and wait for the leader at each vote.
  // Otherwise they would run through the whole loop before the leader has its first tile: 230
  // clocks a tile, and issue slots.
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
        // The second kernel of wide heads reads them too, and does not wait for them: it may start
        // from here.
        ptx::griddepcontrol_launch_dependents();
      }
      ptx::cp_async_bulk_load(ptx::shared_address(smem.lse + stage * Config::kBlockQ),
                              workspace.lse_log2 + row_index, statistics_bytes, query_full);
      if (first && !begun) {  // the first product needs the copies before, not V
        load_keys(smem.value(), maps.value, smem.value_full(), params.value, batch, block.kv_head,
                  col0);
      }
      ptx::mbarrier_wait(smem.dout_empty(stage), next.parity() ^ 1);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive_expect_tx(dout_full, Config::QueryTile::kBytes + statistics_bytes);
      load_tile_panels(smem.dout(stage), maps.dout, dout_full, params.dout, batch, at.head, row0);
      ptx::cp_async_bulk_load(ptx::shared_address(smem.delta + stage * Config::kBlockQ),
                              workspace.delta + row_index, statistics_bytes, dout_full);
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

// Numbers the named barriers. kScoresStored: each consumer signals to the other that its dS^T is
// stored; two of them alternate. kBackwardZeroed: synchronizes one consumer. kDqueryFull: each
// consumer signals to the warp that adds its dQ; two of them alternate. kConsumers: synchronizes
// both consumers. kMayCompute: one consumer lets the other compute.
enum BackwardBarrier : int {
  kScoresStored = 1,
  kBackwardZeroed = 5,
  kDqueryFull = 7,
  kConsumers = 11,
  kMayCompute = 12
};

// Says where a consumer's dQ of a tile is added, and when.
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

// Starts adding staged dQ of a tile to its sums, or storing it there: all blocks of columns in one
// copy if all lanes have places, else one by one. Called by one thread.
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

// Adds a consumer's dQ to the sums. Each consumer has a warp for this, so that neither waits for
// the other's dQ, nor for the other's turns, of which a tile has two. The first turn stores instead
// of adding. The latency from one turn to the next bounds ordered runs; so the lanes look up 32
// tiles at a time, and the read of the next flag overlaps the copy.
template <bool kOrdered, typename Config>
__device__ __forceinline__ void add_dquery(const Backward& params,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem, const BlockPlan& plan,
                                           int32_t key_tiles, const BackwardBlock& block, int group,
                                           StagePair& next) {
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
  // Counts the blocks of 8 columns before this consumer's, and its own.
  const int32_t first_block = Config::kDqueryByRows ? 0 : group * (Config::kDqueryGroupCols / 8);
  const int32_t col_blocks = min(max(head_dim / 8 - first_block, 0), Config::kDqueryGroupCols / 8);
  HeadTile cursor = walk.begin();
  DqueryTile tiles;   // this lane's tile of 32
  int32_t turn = -1;  // value when last read
  const BackwardCounters counters{workspace.counters, plan.ends.kv_heads};
  const int32_t kv_head = block.batch_index * params.shape.kv_heads + block.kv_head;
  if (!kOrdered && leader && kv_head >= plan.zeros.first_head) {
    while (ptx::ld_acquire(counters.zeroed(kv_head)) != key_tiles) continue;
    ptx::fence_proxy_async_global();
  }
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
    const uint32_t staged = smem.staging(group * 2 + stage);
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
    } else if (leader) {
      ptx::cp_async_bulk_wait_group_read<1>();
      if (index > 0) ptx::mbarrier_arrive(smem.dquery_empty(group, stage ^ 1));
      if (index + 1 == count) {  // dK and dV may be staged there next
        ptx::cp_async_bulk_wait_group_read<0>();
        ptx::mbarrier_arrive(smem.dquery_empty(group, stage));
      }
    }
    __syncwarp();
  }
  if (leader && plan.ends.blocks > 0) {
    ptx::cp_async_bulk_wait_group<0>();
    ptx::red_release_add(counters.added(kv_head), plan.split.chunks > 0 ? count : 1);
  }
}

}  // namespace jax_flash::sm90
