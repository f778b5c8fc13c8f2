// Implements the producer warp of the FP8 forward kernel: it describes query tiles to consumers,
// and copies Q, and K, V and their factors from the last key tile of each query tile to the first.
#pragma once

#include <cstdint>

#include "modifiers/segments.cuh"
#include "modifiers/sinks.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward/units_in_turn.cuh"
#include "sm90/forward_float8/config.cuh"
#include "sm90/forward_float8/plan.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Returns the end of the tiles in [first, end) after the last one whose span meets `span`, or
// `first`. Called by whole warps.
template <int kBlock>
__device__ __forceinline__ int32_t last_tile_end(const SegmentSpan* spans, int32_t blocks,
                                                 const SegmentSpan& span, int32_t first,
                                                 int32_t end) {
  for (; end > first; end -= 32) {
    const int32_t mine = end - 1 - static_cast<int32_t>(threadIdx.x % 32);
    const bool meets = mine >= first && span.meets(tile_span<kBlock>(spans, blocks, mine));
    const uint32_t votes = __ballot_sync(0xffffffff, meets);
    if (votes) return end + 1 - __ffs(votes);
  }
  return first;
}

// Describes a query tile. Called by the whole warp.
template <typename Config>
__device__ __forceinline__ Float8Work describe_float8_work(const Float8Plan& plan,
                                                           const QueryTileIndex& q) {
  Float8Work work = {};
  work.row0 = q.tile * Config::kBlockQ;
  work.band = plan.band.of<false>(q.batch_axes);
  work.tiles = kv_tiles<Config::kBlockKv>(work.band, work.row0, work.row0 + Config::kBlockQ);
  if constexpr (Config::kGeneral) {
    if (plan.segments.query != nullptr) {
      const SegmentSpans& all = plan.segments;
      const int64_t queries = int64_t{q.batch} * all.query_blocks;
      const int64_t keys = int64_t{q.batch} * all.key_blocks;
      work.segments = tile_span<Config::kBlockQ>(all.query + queries, all.query_blocks, q.tile);
      work.key_spans = all.key + keys;
      work.query_ids = all.query_ids + queries * kSegmentBlock;
      work.key_ids = all.key_ids + keys * kSegmentBlock;
      Range& tiles = work.tiles;
      tiles.first = next_tile<Config::kBlockKv>(work.key_spans, all.key_blocks, work.segments,
                                                tiles.first, tiles.end);
      tiles.end = last_tile_end<Config::kBlockKv>(work.key_spans, all.key_blocks, work.segments,
                                                  tiles.first, tiles.end);
    }
  }
  // A query tile without keys computes one tile, all of which is forbidden.
  if (work.tiles.first >= work.tiles.end) work.tiles = {0, 1};
  work.out = static_cast<char*>(plan.out.data) +
             (plan.out.at<char>(q, work.row0) - static_cast<char*>(plan.out.data)) *
                 (plan.out_dtype == DType::kFloat32 ? 4 : 2);
  work.lse = plan.lse.at<float>(q, work.row0);
  const float scale = *plan.query_scale.at<const float>(q, work.row0 / kScaleBlock);
  work.to_log2 = scale * plan.to_log2;
  work.greatest = plan.workspace.factors[plan.first_tile(q)].greatest;
  work.sink_log2 = read_sink(plan.sinks.data != nullptr, plan.sinks.at<const float>(q, 0));
  return work;
}

template <typename Config>
struct Float8Producer {
  const Float8Plan& plan;
  const Float8Maps& maps;
  const Float8Smem<Config>& smem;
  RingState<Config::kQueryStages> query_stage;
  RingState<Config::kStages> stage;

  // Copies Q of all consumers. The barrier for Q also covers `work`.
  __device__ __forceinline__ void load_query(const QueryTileIndex& q, const Float8Work& work) {
    using Tile = typename Config::QueryTile;
    const uint32_t full = smem.query_full(query_stage.stage);
    ptx::mbarrier_wait_asleep(smem.query_empty(query_stage.stage), query_stage.parity ^ 1);
    smem.works[query_stage.stage] = work;
    ptx::mbarrier_arrive_expect_tx(full, Config::kConsumers * Tile::kBytes);
#pragma unroll
    for (int group = 0; group < Config::kConsumers; ++group) {
      load_panels(smem.query(query_stage.stage, group), maps.query, full, plan.query, q.batch_axes,
                  q.head, work.row0 + group * 64);
    }
    query_stage.advance();
  }

  // Copies a tile of K and V, and their factors.
  __device__ __forceinline__ void load_keys(const QueryTileIndex& q, int32_t tile) {
    using Keys = typename Config::KeyTile;
    using Values = typename Config::ValueTile;
    const int64_t index = plan.first_tile(q) + tile;
    const uint32_t key_full = smem.key_full(stage.stage), value_full = smem.value_full(stage.stage);
    ptx::mbarrier_wait_asleep(smem.key_empty(stage.stage), stage.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(key_full, Keys::kBytes + sizeof(KeyFactors));
    load_panels(smem.key(stage.stage), maps.key, key_full, plan.key, q.batch_axes, q.kv_head,
                tile * Config::kBlockKv);
    ptx::cp_async_bulk_load(smem.factors_of(stage.stage), plan.workspace.factors + index,
                            sizeof(KeyFactors), key_full);
    ptx::mbarrier_wait_asleep(smem.value_empty(stage.stage), stage.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(value_full, Values::kBytes);
    ptx::cp_async_bulk_load(smem.value(stage.stage).root + smem.value(stage.stage).offset,
                            plan.workspace.values + index * Values::kBytes, Values::kBytes,
                            value_full);
    stage.advance();
  }

  // Processes all query tiles of the block. Called by one warp, whose first lane starts the copies.
  __device__ __forceinline__ void run() {
    const bool leads = threadIdx.x % 32 == 0;
    ptx::griddepcontrol_wait();
    QueryTileCursor cursor{plan.schedule};
    while (cursor.valid()) {
      const QueryTileIndex q = cursor.index();
      const Float8Work work = describe_float8_work<Config>(plan, q);
      if (leads) {
        load_query(q, work);
        for (int32_t tile = work.tiles.end - 1; tile >= work.tiles.first; --tile) {
          load_keys(q, tile);
        }
      }
      __syncwarp();
      advance_in_turn(cursor, plan, leads);
    }
    if (leads) {
      ptx::mbarrier_wait_asleep(smem.query_empty(query_stage.stage), query_stage.parity ^ 1);
      smem.works[query_stage.stage].row0 = -1;
      ptx::mbarrier_arrive(smem.query_full(query_stage.stage));
    }
  }
};

}  // namespace jax_flash::sm90
