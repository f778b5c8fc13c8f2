// Computes dQ for head dims above 128: the second kernel of sm90/backward/wide.cuh.
//
// A thread block owns 128 query rows. Warp 0 starts the copies. Two consumer warpgroups own 64 rows
// each, and keep their dQ in registers. WideQueryConfig has the shared-memory layout: Q, dO, and
// rings of K and of V. K has more stages, because a tile's K is needed until dQ, its V only until
// dP.
#pragma once

#include <cstdint>

#include "modifiers/score_gradient.cuh"
#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/wide.cuh"
#include "sm90/fragments.cuh"
#include "sm90/ring.cuh"
#include "tile/bad_key_rows.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/quad.cuh"

namespace jax_flash::sm90 {

// Holds the addresses of the second kernel's tiles and barriers.
template <typename Config>
struct WideQuerySmem {
  static constexpr int kBarriers = 2 + 2 * Config::kKeyStages + 2 * Config::kValueStages;
  uint32_t root, barriers;
  int32_t* tiles;  // [kKeyStages]: a tile's first key, -1 after the last tile

  __device__ __forceinline__ typename Config::QueryTile query() const { return {root, 0}; }
  __device__ __forceinline__ typename Config::QueryTile dout() const {
    return {root, Config::kOutOffset};
  }
  __device__ __forceinline__ typename Config::KeyTile key(uint32_t stage) const {
    return {root, Config::kKeyOffset + stage * Config::KeyTile::kBytes};
  }
  __device__ __forceinline__ typename Config::KeyTile value(uint32_t stage) const {
    return {root, Config::kValueOffset + stage * Config::KeyTile::kBytes};
  }
  __device__ __forceinline__ uint32_t query_full() const { return barriers; }
  __device__ __forceinline__ uint32_t dout_full() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t key_full(uint32_t stage) const {
    return barriers + 16 + stage * 16;
  }
  __device__ __forceinline__ uint32_t key_empty(uint32_t stage) const {
    return key_full(stage) + 8;
  }
  __device__ __forceinline__ uint32_t value_full(uint32_t stage) const {
    return key_full(Config::kKeyStages + stage);
  }
  __device__ __forceinline__ uint32_t value_empty(uint32_t stage) const {
    return value_full(stage) + 8;
  }
  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(query_full(), 1);
    ptx::mbarrier_init(dout_full(), 1);
    for (uint32_t stage = 0; stage < Config::kKeyStages + Config::kValueStages; ++stage) {
      ptx::mbarrier_init(key_full(stage), 1);
      ptx::mbarrier_init(key_empty(stage), Config::kConsumers * 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
};

// Describes the query tile of a thread block, and the key tiles that it visits.
struct WideQueryBlock {
  BatchIndex batch;
  Band band;
  Range range;
  const SegmentSpan* key_spans;  // or null
  SegmentSpan query_span;
  int32_t key_blocks, head, kv_head, row0, batch_index;

  template <int kBlockKv>
  __device__ __forceinline__ int32_t skip_to(int32_t candidate) const {
    if (key_spans == nullptr) return candidate;
    return next_tile<kBlockKv>(key_spans, key_blocks, query_span, candidate, range.end);
  }
};

// Starts the copies of Q, dO and, tile by tile, of K and V. Called by warp 0.
template <typename Config>
__device__ __forceinline__ void load_key_tiles(const Backward& params, const BackwardMaps& maps,
                                               const WideQuerySmem<Config>& smem,
                                               const WideQueryBlock& block) {
  const bool leader = threadIdx.x == 0;
  int32_t tile = block.skip_to<Config::kBlockKv>(block.range.first);
  RingState<Config::kKeyStages> key_ring;
  RingState<Config::kValueStages> value_ring;
  if (leader && tile < block.range.end) {
    ptx::mbarrier_arrive_expect_tx(smem.query_full(), Config::QueryTile::kBytes);
    load_panels(smem.query(), maps.query, smem.query_full(), params.query, block.batch, block.head,
                block.row0);
  }
  if (!leader && block.key_spans == nullptr) tile = block.range.end;  // see load_tiles()
  for (bool first = true; tile < block.range.end; first = false) {
    const int32_t col0 = tile * Config::kBlockKv;
    tile = block.skip_to<Config::kBlockKv>(tile + 1);
    if (!leader) continue;
    const uint32_t key_full = smem.key_full(key_ring.stage);
    ptx::mbarrier_wait(smem.key_empty(key_ring.stage), key_ring.parity ^ 1);
    smem.tiles[key_ring.stage] = col0;
    ptx::mbarrier_arrive_expect_tx(key_full, Config::KeyTile::kBytes);
    load_panels(smem.key(key_ring.stage), maps.key, key_full, params.key, block.batch,
                block.kv_head, col0);
    key_ring.advance();
    if (first) {
      ptx::mbarrier_arrive_expect_tx(smem.dout_full(), Config::QueryTile::kBytes);
      load_panels(smem.dout(), maps.dout, smem.dout_full(), params.dout, block.batch, block.head,
                  block.row0);
    }
    const uint32_t value_full = smem.value_full(value_ring.stage);
    ptx::mbarrier_wait(smem.value_empty(value_ring.stage), value_ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(value_full, Config::KeyTile::kBytes);
    load_panels(smem.value(value_ring.stage), maps.value, value_full, params.value, block.batch,
                block.kv_head, col0);
    value_ring.advance();
  }
  if (leader) {
    ptx::mbarrier_wait(smem.key_empty(key_ring.stage), key_ring.parity ^ 1);
    smem.tiles[key_ring.stage] = -1;
    ptx::mbarrier_arrive(smem.key_full(key_ring.stage));
  }
  ptx::griddepcontrol_wait();  // this kernel must not complete before the first
}

// Holds the state of a consumer warpgroup and implements the steps of its work.
template <typename Config, typename Element, bool kGeneral>
struct WideQueryConsumer {
  static constexpr int kN = Config::kBlockKv / 8;
  using Tile = float[1][kN][4];  // 64 query rows by 64 keys, of the warpgroup

  const Backward& params;
  const WideQuerySmem<Config>& smem;
  const WideQueryBlock& block;
  const Band& band;
  // References, as in NarrowConsumer: copies would change the order of the registers.
  const int& group;
  const int32_t& group_row0;
  const int32_t& warp_row0;
  const float& to_log2;
  RingState<Config::kValueStages>& ring;  // of V

  // Zeroes keys or values that no row may attend to.
  __device__ __forceinline__ void zero_unattended(const typename Config::KeyTile& tile,
                                                  int32_t tile_col0) const {
    const int32_t first = max(0, band.lo) - tile_col0;
    const int32_t end = min(band.kv_len, band.q_len - 1 + band.hi) - tile_col0;
    if (first > 0 || (end < Config::kBlockKv && tile_col0 + end < params.shape.kv_len)) {
      zero_rows(tile, first, end, kWideZeroed + group);
    }
  }
  // Zeroes rows of Q and dO beyond the end of the sequence.
  __device__ __forceinline__ void zero_padding() const {
    const int32_t rows = band.q_len - block.row0;
    if (rows < Config::kBlockQ && band.q_len < params.shape.q_len) {
      zero_rows(smem.query(), 0, rows, kWideZeroed + group);
      zero_rows(smem.dout(), 0, rows, kWideZeroed + group);
    }
  }
  // Rows beyond a head's last row load values of another head's rows, or padding. Their results
  // stay in their own rows, which are not stored.
  __device__ __forceinline__ void load_row_statistics(const BackwardWorkspace& workspace,
                                                      float (&lse_log2)[1][2],
                                                      float (&delta)[1][2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index =
          (int64_t{block.batch_index} * params.shape.heads + block.head) * workspace.rows +
          warp_row0 + fragment_row(0, 2 * half);
      lse_log2[0][half] = __ldcg(workspace.lse_log2 + index);
      delta[0][half] = __ldcg(workspace.delta + index);
    }
  }
  __device__ __forceinline__ void prepare_key(const typename Config::KeyTile& key,
                                              int32_t tile_col0, uint32_t* bad_keys) const {
    zero_unattended(key, tile_col0);
    if constexpr (kGeneral) {
      clear_bad_key_rows<Config::kConsumerThreads, Element>(key, bad_keys, threadIdx.x - 128,
                                                            kWideConsumers);
    }
  }
  __device__ __forceinline__ void await_value(int32_t tile_col0) const {
    ptx::mbarrier_wait(smem.value_full(ring.stage), ring.parity);
    zero_unattended(smem.value(ring.stage), tile_col0);
  }
  // Starts S = Q K^T or dP = dO V^T.
  __device__ __forceinline__ void start_product(Tile& d, const typename Config::QueryTile& a,
                                                const typename Config::KeyTile& b) const {
    start_product_k_major<Element, Config::kBlockKv>(d[0], rows_from(a, group * 64), b);
  }

  // Turns finished S into P.
  __device__ __forceinline__ void find_probabilities(Tile& scores, const float (&lse_log2)[1][2],
                                                     uint32_t* bad_keys, int32_t tile_col0) const {
    const ScoreGradient<kGeneral, 1, kN, Element> gradient(params, block.batch, block.head,
                                                           warp_row0, tile_col0);
    if constexpr (kGeneral) mark_bad_keys<Config::kBlockKv>(scores, bad_keys, 0);
    if (kGeneral || !band.all_allowed(group_row0, min(group_row0 + 64, band.q_len), tile_col0,
                                      tile_col0 + Config::kBlockKv)) {
      gradient.mask(scores, band);
    }
    gradient.probabilities(scores[0], lse_log2[0], to_log2, 0, 0, kN);
  }
  // Releases V and turns finished dP into dS.
  __device__ __forceinline__ void find_dscores(Tile& scores, Tile& dscores,
                                               const float (&lse_log2)[1][2],
                                               const float (&delta)[1][2],
                                               int32_t tile_col0) const {
    sync_and_arrive_warp(smem.value_empty(ring.stage));
    ring.advance();
    const ScoreGradient<kGeneral, 1, kN, Element> gradient(params, block.batch, block.head,
                                                           warp_row0, tile_col0);
    gradient.finish(scores, dscores, lse_log2, delta);
  }
};

// Runs a consumer: computes dQ of 64 rows over all key tiles.
template <typename Config, typename Element, bool kGeneral>
__device__ __forceinline__ void consume_key_tiles(const Backward& params,
                                                  const BackwardWorkspace& workspace,
                                                  const WideQuerySmem<Config>& smem,
                                                  const WideQueryBlock& block) {
  constexpr int kSteps = Config::kBlockKv / 16;
  const Shape& shape = params.shape;
  const Band& band = block.band;
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  const int32_t group_row0 = block.row0 + group * 64;
  const int32_t warp_row0 = group_row0 + threadIdx.x % 128 / 32 * 16;
  const float to_log2 = params.options.scale * kLog2E;

  float dquery[Config::kHeadDim / 8][4];
  clear(dquery);
  RingState<Config::kKeyStages> key_ring;
  RingState<Config::kValueStages> value_ring;
  ptx::mbarrier_wait(smem.key_full(0), 0);
  int32_t col0 = smem.tiles[0];
  __shared__ uint32_t bad_keys_smem[Config::kKeyStages][Config::kBlockKv / 32 + 1];
  const WideQueryConsumer<Config, Element, kGeneral> consumer{
      params, smem, block, band, group, group_row0, warp_row0, to_log2, value_ring};
  // Returns flags of keys that are NaN or infinite: see tile/bad_key_rows.cuh. Only this lambda
  // names the array, so that the compiler places it behind the kernel's other variables.
  const auto bad_keys = [&](uint32_t stage) { return bad_keys_smem[stage]; };
  if (col0 >= 0) {
    float lse_log2[1][2], delta[1][2];
    ptx::mbarrier_wait(smem.query_full(), 0);
    ptx::mbarrier_wait(smem.dout_full(), 0);
    consumer.zero_padding();
    consumer.load_row_statistics(workspace, lse_log2, delta);

    typename WideQueryConsumer<Config, Element, kGeneral>::Tile scores, dscores;
    uint32_t rounded[kSteps][4];
    consumer.prepare_key(smem.key(0), col0, bad_keys(0));
    consumer.start_product(scores, smem.query(), smem.key(0));
    consumer.await_value(col0);
    consumer.start_product(dscores, smem.dout(), smem.value(value_ring.stage));
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores[0]);
    consumer.find_probabilities(scores, lse_log2, bad_keys(0), col0);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(dscores[0]);
    consumer.find_dscores(scores, dscores, lse_log2, delta, col0);
    do {
      round_fragments<Element>(rounded, dscores[0]);
      const uint32_t stage = key_ring.stage;
      start_product_add<Element, Config::kHeadDim>(dquery, rounded, smem.key(stage));
      key_ring.advance();
      ptx::mbarrier_wait(smem.key_full(key_ring.stage), key_ring.parity);
      col0 = smem.tiles[key_ring.stage];
      // Starts S and dP of the next tile. After the last tile, this computes those of old stages,
      // which are discarded.
      if (col0 >= 0) {
        consumer.prepare_key(smem.key(key_ring.stage), col0, bad_keys(key_ring.stage));
      }
      consumer.start_product(scores, smem.query(), smem.key(key_ring.stage));
      if (col0 >= 0) consumer.await_value(col0);
      consumer.start_product(dscores, smem.dout(), smem.value(value_ring.stage));
      ptx::wgmma_wait_group<2>();
      ptx::wgmma_results(dquery);
      sync_and_arrive_warp(smem.key_empty(stage));
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_results(scores[0]);
      if (col0 >= 0) consumer.find_probabilities(scores, lse_log2, bad_keys(key_ring.stage), col0);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(dscores[0]);
      if (col0 >= 0) consumer.find_dscores(scores, dscores, lse_log2, delta, col0);
    } while (col0 >= 0);
  }
  store_rows(block.batch.template pointer<Element>(params.dquery, block.head) +
                 warp_row0 * params.dquery.row,
             params.dquery.row, shape.q_len - warp_row0, shape.head_dim, params.options.scale,
             dquery);
}

// Computes dQ: the second kernel.
template <typename Config, typename Element, bool kGeneral>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_wide_query_kernel(const __grid_constant__ Backward params,
                               const __grid_constant__ BackwardMaps maps,
                               const BackwardWorkspace workspace,
                               const __grid_constant__ TileSchedule schedule) {
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[WideQuerySmem<Config>::kBarriers];
  __shared__ int32_t tile_indices_smem[Config::kKeyStages];
  __shared__ __align__(16) uint8_t block_bytes_smem[sizeof(WideQueryBlock)];
  WideQueryBlock& block = *reinterpret_cast<WideQueryBlock*>(block_bytes_smem);
  const WideQuerySmem<Config> smem{ptx::shared_address(tiles_smem),
                                   ptx::shared_address(barriers_smem), tile_indices_smem};
  const Shape& shape = params.shape;
  int32_t batch_head, tile;
  schedule.at(blockIdx.x, batch_head, tile);
  const int32_t batch_index = batch_head / shape.heads, head = batch_head % shape.heads;
  const int32_t row0 = tile * Config::kBlockQ;
  const BatchIndex batch(shape, batch_index);
  const Band band(params, batch);
  const Range range = kv_tiles<Config::kBlockKv>(band, row0, row0 + Config::kBlockQ);
  if (threadIdx.x == 0) {
    smem.init_barriers();
    const SegmentSpans& spans = workspace.spans;
    block = {batch, band,
             range, nullptr,
             {},    spans.key_blocks,
             head,  head / (shape.heads / shape.kv_heads),
             row0,  batch_index};
    if (kGeneral && spans.query) {
      block.key_spans = spans.key + int64_t{batch_index} * spans.key_blocks;
      block.query_span = tile_span<Config::kBlockQ>(
          spans.query + int64_t{batch_index} * spans.query_blocks, spans.query_blocks, tile);
    }
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) load_key_tiles(params, maps, smem, block);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume_key_tiles<Config, Element, kGeneral>(params, workspace, smem, block);
  }
}

}  // namespace jax_flash::sm90
