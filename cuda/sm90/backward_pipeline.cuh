// How query tiles reach the consumers of a backward kernel whose block owns keys, and dQ leaves
// them: what the block works on, its shared memory, and the warps that start the copies.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward_parts.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/segments.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

template <typename Config>
struct BackwardSmem {
  uint32_t root;      // of the tiles
  uint32_t barriers;  // key_full, value_full, then kStages of each of the others
  float* lse;         // [kStages][kBlockQ]
  float* delta;       // likewise
  int2* tiles;        // [kStages]: a tile's first row, -1 after the last tile; its head

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
  // Of staged sums: dQ of a warpgroup, or P^T of a stage.
  __device__ __forceinline__ uint32_t staging(int index) const {
    return root + Config::kStagingOffset + index * Config::kStagingBytes;
  }
  __device__ __forceinline__ uint32_t key_full() const { return barriers; }
  __device__ __forceinline__ uint32_t value_full() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t query_full(uint32_t stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t query_empty(uint32_t stage) const { return at(1, stage); }
  __device__ __forceinline__ uint32_t dout_full(uint32_t stage) const { return at(2, stage); }
  __device__ __forceinline__ uint32_t dout_empty(uint32_t stage) const { return at(3, stage); }

  // Of dQ on its way out, of which a consumer has two stages: the other kernel has no barriers like
  // that, but the following.
  __device__ __forceinline__ uint32_t dquery_empty(int group, uint32_t stage) const {
    return at(4 + group, stage);
  }
  // Of P^T on its way from one consumer to the other, in the kernel that has it.
  __device__ __forceinline__ uint32_t staging_full(uint32_t stage) const { return at(4, stage); }
  __device__ __forceinline__ uint32_t staging_empty(uint32_t stage) const { return at(5, stage); }

  static constexpr int kBarriers = 2 + 6 * Config::kStages;
  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(key_full(), 1);
    ptx::mbarrier_init(value_full(), 1);
    for (uint32_t stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(query_full(stage), 1);
      ptx::mbarrier_init(query_empty(stage), Config::kConsumers * 4);
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init(dout_empty(stage), Config::kConsumers * 4);
      ptx::mbarrier_init(staging_full(stage), Config::kStagingArrivals);
      ptx::mbarrier_init(staging_empty(stage), Config::kStagingArrivals);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t at(uint32_t kind, uint32_t stage) const {
    return barriers + 16 + (kind * Config::kStages + stage) * 8;
  }
};

// What a block works on: in shared memory, since the warps that copy have few registers.
struct BackwardBlock {
  BatchIndex batch;
  Band band;
  QueryTileWalk walk;
  int32_t kv_head, kv_tile, batch_index;

  // By whole warps.
  template <typename Config, bool kGeneral>
  static __device__ __forceinline__ BackwardBlock at(const Backward& params, int32_t batch_kv_head,
                                                     int32_t kv_tile, const SegmentSpans& spans,
                                                     TurnOrder order) {
    const Shape& shape = params.shape;
    const int32_t batch_index = batch_kv_head / shape.kv_heads;
    const int32_t kv_head = batch_kv_head % shape.kv_heads, group = shape.heads / shape.kv_heads;
    const BatchIndex batch(shape, batch_index);
    const Band band(params, batch);
    const int32_t col0 = kv_tile * Config::kBlockKv;
    QueryTileWalk walk{q_tiles<Config::kBlockQ>(band, col0, col0 + Config::kBlockKv),
                       kv_head * group, kv_head * group + group};
    if (kGeneral && spans.query && order == TurnOrder::kNone) {
      walk.query_blocks = spans.query_blocks;
      walk.query_spans = spans.query + int64_t{batch_index} * spans.query_blocks;
      walk.key_span = tile_span<Config::kBlockKv>(
          spans.key + int64_t{batch_index} * spans.key_blocks, spans.key_blocks, kv_tile);
    }
    walk.start_at<Config::kBlockQ>(
        shifted_start<Config::kBlockKv>(band, order, walk.range, kv_tile));
    return {batch, band, walk, kv_head, kv_tile, batch_index};
  }
  // Of a query head among those of all batches.
  __device__ __forceinline__ int64_t batch_head(const Shape& shape, int32_t head) const {
    return int64_t{batch_index} * shape.heads + head;
  }
};

template <typename Config>
__device__ __forceinline__ void load_tiles(const Backward& params, const BackwardMaps& maps,
                                           const BackwardWorkspace& workspace,
                                           const BackwardSmem<Config>& smem,
                                           const BackwardBlock& block) {
  constexpr uint32_t kStatisticsBytes = Config::kBlockQ * 4;
  const bool leader = threadIdx.x == 0;
  const BatchIndex& batch = block.batch;
  const int32_t col0 = block.kv_tile * Config::kBlockKv;
  const QueryTileWalk& walk = block.walk;
  QueryTileCursor at = walk.begin();
  if (leader && !walk.done(at)) {
    ptx::mbarrier_arrive_expect_tx(smem.key_full(), Config::KeyTile::kBytes);
    load_tile_panels(smem.key(), maps.key, smem.key_full(), params.key, batch, block.kv_head, col0);
    ptx::griddepcontrol_wait();  // for lse and delta
    // The second kernel of wide heads reads them too, and does not wait: it may start from here on.
    ptx::griddepcontrol_launch_dependents();
  }
  bool has_value = false;
  Ring<Config::kStages> ring;
  for (; !walk.done(at); walk.advance<Config::kBlockQ>(at), ring.advance()) {
    if (!leader) continue;
    const int32_t row0 = at.tile * Config::kBlockQ;
    const int64_t row_index = block.batch_head(params.shape, at.head) * workspace.rows + row0;
    const uint32_t query_full = smem.query_full(ring.stage), dout_full = smem.dout_full(ring.stage);
    ptx::mbarrier_wait(smem.query_empty(ring.stage), ring.parity ^ 1);
    smem.tiles[ring.stage] = {row0, at.head};
    ptx::mbarrier_arrive_expect_tx(query_full, Config::QueryTile::kBytes + kStatisticsBytes);
    load_tile_panels(smem.query(ring.stage), maps.query, query_full, params.query, batch, at.head,
                     row0);
    ptx::cp_async_bulk_load(ptx::shared_address(smem.lse + ring.stage * Config::kBlockQ),
                            workspace.lse_log2 + row_index, kStatisticsBytes, query_full);
    if (!has_value) {  // after what the first product needs
      ptx::mbarrier_arrive_expect_tx(smem.value_full(), Config::KeyTile::kBytes);
      load_tile_panels(smem.value(), maps.value, smem.value_full(), params.value, batch,
                       block.kv_head, col0);
      has_value = true;
    }
    ptx::mbarrier_wait(smem.dout_empty(ring.stage), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(dout_full, Config::QueryTile::kBytes + kStatisticsBytes);
    load_tile_panels(smem.dout(ring.stage), maps.dout, dout_full, params.dout, batch, at.head,
                     row0);
    ptx::cp_async_bulk_load(ptx::shared_address(smem.delta + ring.stage * Config::kBlockQ),
                            workspace.delta + row_index, kStatisticsBytes, dout_full);
  }
  if (leader) {
    ptx::mbarrier_wait(smem.query_empty(ring.stage), ring.parity ^ 1);
    smem.tiles[ring.stage] = {-1, 0};
    ptx::mbarrier_arrive(smem.query_full(ring.stage));
  }
}

// Named barriers: of one consumer with the other, which says that its dS^T is stored, in turn of
// two; of each consumer; of each with the warp that adds its dQ, in turn of two; of both consumers;
// of one with the other, which lets it compute.
enum BackwardBarrier : int {
  kScoresStored = 1,
  kZeroed = 5,
  kDqueryFull = 7,
  kConsumers = 11,
  kMayCompute = 12
};

// By a warp for each consumer, so that neither waits for the other's dQ; nor for the turns of its
// own, of which there are two for a tile.
template <typename Config>
__device__ __forceinline__ void add_dquery(const Backward& params,
                                           const BackwardWorkspace& workspace, TurnOrder order,
                                           const BackwardSmem<Config>& smem,
                                           const BackwardBlock& block, int group) {
  const bool leader = threadIdx.x % 32 == 0;
  const QueryTileWalk& walk = block.walk;
  ptx::griddepcontrol_wait();  // for the zeros
  int half = 0, count = 0;
  for (QueryTileCursor at = walk.begin(); !walk.done(at); walk.advance<Config::kBlockQ>(at)) {
    const int32_t row0 = at.tile * Config::kBlockQ;
    const int64_t batch_head = block.batch_head(params.shape, at.head);
    float* sums = workspace.dquery + (batch_head * workspace.rows + row0) * Config::kDqueryCols +
                  group * (Config::kStagingBytes / 4);
    int32_t* turns = workspace.turns + batch_head * (workspace.rows / kEdgeRows) +
                     at.tile * Config::kConsumers + group;
    int32_t mine = 0;
    if (order != TurnOrder::kNone && leader) {
      mine = turn_of<Config::kBlockKv>(block.band, order, block.kv_tile, at.tile, walk.range.end,
                                       row0, row0 + Config::kBlockQ);
    }
    ptx::barrier_sync(kDqueryFull + group * 2 + half, 128 + 32);
    if (leader) {
      if (order != TurnOrder::kNone) {
        while (ptx::ld_acquire(turns) != mine) {
        }
        ptx::fence_proxy_async_global();
      }
      ptx::cp_reduce_async_bulk_add_f32(sums, smem.staging(group * 2 + half),
                                        Config::kStagingBytes);
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read<1>();
      if (count > 0) ptx::mbarrier_arrive(smem.dquery_empty(group, half ^ 1));
      if (order != TurnOrder::kNone) {
        ptx::cp_async_bulk_wait_group<0>();
        ptx::fence_proxy_async_global();
        ptx::st_release(turns, mine + 1);
      }
    }
    __syncwarp();
    half ^= 1;
    count = 1;
  }
  if (leader) ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace jax_flash::sm90
