// How query tiles reach the consumers of a backward kernel whose block owns keys: what the block
// works on, its shared memory, and the warp that starts the copies.
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
      ptx::mbarrier_init(staging_full(stage), 4);
      ptx::mbarrier_init(staging_empty(stage), 4);
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

}  // namespace jax_flash::sm90
