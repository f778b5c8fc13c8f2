// Computes the backward pass for head dims above 128. There, the accumulators of dK and dV leave no
// room for more than 64 keys a block, and dQ's sums would bound a single kernel. So there are two
// kernels: both compute S and dP, and neither sums in global memory. Both are deterministic.
//
//   backward_wide_key_kernel     for each query tile, 64 rows:
//     warpgroup 0   S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - lse) to shared memory, dV += P^T dO
//     warpgroup 1   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
//   backward_wide_query_kernel   for each key tile, 64 keys; a warpgroup owns 64 rows:
//     S = Q K^T,  dP = dO V^T,  P = ...,  dS = ...,  dQ += dS K
//
// A warpgroup starts the next tile's S or dP right after the product that adds to its accumulators:
// its part of the tile's stage is then free while S or dP runs, which hides the next copy to that
// part. Exponentials and dS overlap the other warpgroup's products. Warp 0 starts the copies.
// Blocks of the second kernel start on multiprocessors that the first leaves idle, and need not
// wait: they are let in when the last block of the first has seen that what both read is complete.
// The shared-memory layout is in sm90/backward/config.cuh.
#pragma once

#include <cstdint>

#include "modifiers/score_gradient.cuh"
#include "modifiers/score_gradient_transposed.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/fragments.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/smem.cuh"
#include "tile/bad_key_rows.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/quad.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Numbers the named barriers: one of both consumers, and one of each.
enum WideBarrier : int { kWideConsumers = 1, kWideZeroed = 2 };

// Returns a tile's rows from row0 on, a multiple of 8. The offset becomes part of the tile's
// address, which is in one register, not of every descriptor.
template <typename Tile>
__device__ __forceinline__ Tile rows_from(Tile tile, int row0) {
  tile.offset += row0 * 128;
  return tile;
}

// Computes d = 64 rows of a, from its first on, times b^T.
template <typename Element, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void start_product_k_major(float (&d)[kN / 8][4], TileA a,
                                                      const TileB& b) {
  // Without this, the compiler keeps all descriptors of an invariant operand, and spills them.
  asm volatile("" : "+r"(a.root));
  forget(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileA::kCols / 16; ++k) {
    ptx::Wgmma<Element, kN>::template ss<0, 0>(d, operand_k_major(a, 0, k),
                                               operand_k_major(b, 0, k), k > 0);
  }
  ptx::wgmma_commit_group();
}

// Computes d += a b for a in registers; b's rows are the inner dimension.
template <typename Element, int kN, int kSteps, typename Tile>
__device__ __forceinline__ void start_product_add(float (&d)[kN / 8][4],
                                                  const uint32_t (&a)[kSteps][4], const Tile& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::Wgmma<Element, kN>::template rs<1>(d, a[k], operand_mn_major(b, 0, k), 1);
  }
  ptx::wgmma_commit_group();
}

// Runs either role of the first kernel. kScores: warpgroup 0, whose `first` operands are K and Q
// and whose sum is dV; otherwise V, dO and dK.
template <typename Config, typename Element, bool kGeneral, bool kScores>
__device__ __forceinline__ void consume_wide_tiles(const Backward& params,
                                                   const BackwardSmem<Config>& smem,
                                                   const BackwardBlock& block) {
  constexpr int kN = Config::kBlockQ / 8, kSteps = Config::kBlockQ / 16;
  constexpr int kGroup = kScores ? 0 : 1;
  const Shape& shape = params.shape;
  const Band& band = block.band;
  const int32_t col0 = block.kv_tile * Config::kBlockKv;
  const int warp_key = threadIdx.x % 128 / 32 * 16;
  const float to_log2 = params.options.scale * kLog2E;

  float sum[Config::kHeadDim / 8][4];
  clear(sum);
  const auto write_gradient = [&] {
    const Operand& gradient = kScores ? params.dvalue : params.dkey;
    const int32_t row0 = col0 + warp_key;
    store_rows(block.batch.template pointer<Element>(gradient, block.kv_head) + row0 * gradient.row,
               gradient.row, shape.kv_len - row0, kScores ? shape.value_dim : shape.head_dim,
               kScores ? 1.0f : params.options.scale, sum);
  };
  RingState<Config::kStages> ring;
  ptx::mbarrier_wait(smem.query_full(0), 0);
  int2 tile = smem.tiles[0];
  if (tile.x < 0) {
    write_gradient();
    return;
  }

  // Zeroes keys and values that no row may attend to.
  ptx::mbarrier_wait(kScores ? smem.key_full() : smem.value_full(), 0);
  const auto own = kScores ? smem.key() : smem.value();
  const int32_t first = max(0, band.lo) - col0;
  const int32_t end = min(band.kv_len, band.q_len - 1 + band.hi) - col0;
  if (first > 0 || (end < Config::kBlockKv && col0 + end < shape.kv_len)) {
    zero_rows(own, first, end, kWideZeroed + kGroup);
  }
  const auto zero_padding = [&](const typename Config::QueryTile& rows_smem, int32_t row0) {
    if (row0 + Config::kBlockQ > band.q_len && band.q_len < shape.q_len) {
      zero_rows(rows_smem, 0, band.q_len - row0, kWideZeroed + kGroup);
    }
  };
  // Select an operand of a stage: `near` is multiplied by `own`, `far` is for the product that adds
  // to the sum.
  const auto near = [&](uint32_t stage) { return kScores ? smem.query(stage) : smem.dout(stage); };
  const auto far = [&](uint32_t stage) { return kScores ? smem.dout(stage) : smem.query(stage); };
  // Turns finished products into P^T, which is also staged for the other warpgroup, or into dS^T.
  const auto refine = [&](float (&products)[kN][4], const RingState<Config::kStages>& at,
                          const int2& here, uint32_t (&kept)[2][(kN + 15) / 16]) {
    const float* lse_smem = smem.lse + at.stage * Config::kBlockQ;
    const TransposedGradient<kGeneral, kN> gradient{params, block.batch, here.y, col0 + warp_key,
                                                    here.x};
    const uint32_t staged = smem.staging(at.stage);
    gradient.draw(kept);
    if constexpr (kScores) {
      if (kGeneral || !band.all_allowed(here.x, min(here.x + Config::kBlockQ, band.q_len), col0,
                                        col0 + Config::kBlockKv)) {
        gradient.mask(products, band);
      }
      gradient.probabilities(products, ColumnsInShared(lse_smem), lse_smem, to_log2);
      ptx::mbarrier_wait(smem.staging_empty(at.stage), at.parity ^ 1);
      stage_accumulators(staged, products, threadIdx.x % 128);
      arrive_by_warp(smem.staging_full(at.stage));
      if constexpr (kGeneral) gradient.drop(products, kept);
    } else {
      ptx::mbarrier_wait(smem.staging_full(at.stage), at.parity);
      float p[kN][4];
      load_staged(p, staged);
      arrive_by_warp(smem.staging_empty(at.stage));
      gradient.finish(p, products, lse_smem, smem.delta + at.stage * Config::kBlockQ, kept);
    }
  };

  float products[kN][4];
  uint32_t rounded[kSteps][4], kept[2][(kN + 15) / 16];
  if (!kScores) ptx::mbarrier_wait(smem.dout_full(0), 0);
  zero_padding(near(0), tile.x);
  start_product_k_major<Element, Config::kBlockQ>(products, own, near(0));
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_results(products);
  refine(products, ring, tile, kept);
  do {
    round_fragments<Element>(rounded, products);
    const RingState<Config::kStages> at = ring;
    // dV += P^T dO or dK += dS^T Q
    if (kScores) ptx::mbarrier_wait(smem.dout_full(at.stage), at.parity);
    zero_padding(far(at.stage), tile.x);
    start_product_add<Element, Config::kHeadDim>(sum, rounded, far(at.stage));
    // Starts the next tile's S^T or dP^T; after the last tile it recomputes that of an old stage
    // and discards it.
    ring.advance();
    ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
    tile = smem.tiles[ring.stage];
    if (tile.x >= 0) {
      if (!kScores) ptx::mbarrier_wait(smem.dout_full(ring.stage), ring.parity);
      zero_padding(near(ring.stage), tile.x);
    }
    start_product_k_major<Element, Config::kBlockQ>(products, own, near(ring.stage));
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(sum);
    arrive_by_warp(smem.query_empty(at.stage));
    arrive_by_warp(smem.dout_empty(at.stage));
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(products);
    if (tile.x >= 0) refine(products, ring, tile, kept);
  } while (tile.x >= 0);
  write_gradient();
}

// Computes dK and dV: the first kernel.
template <typename Config, typename Element, bool kGeneral>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_wide_key_kernel(const __grid_constant__ Backward params,
                             const __grid_constant__ BackwardMaps maps,
                             const BackwardWorkspace workspace,
                             const __grid_constant__ TileSchedule schedule,
                             const __grid_constant__ BlockPlan plan) {
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(128) float statistics_smem[2][Config::kStages * Config::kBlockQ];
  __shared__ __align__(8) uint64_t barriers_smem[BackwardSmem<Config>::kBarriers];
  __shared__ int2 tile_indices_smem[Config::kStages];
  __shared__ __align__(16) uint8_t block_bytes_smem[sizeof(BackwardBlock)];
  BackwardBlock& block = *reinterpret_cast<BackwardBlock*>(block_bytes_smem);
  const BackwardSmem<Config> smem{ptx::shared_address(tiles_smem),
                                  ptx::shared_address(barriers_smem),
                                  statistics_smem[0],
                                  statistics_smem[1],
                                  tile_indices_smem,
                                  &block};
  if (threadIdx.x < 32) {
    smem.init_barriers();
    const auto here = BackwardBlock::at<Config, kGeneral>(params, plan, schedule, blockIdx.x,
                                                          workspace.spans, TurnOrder::kNone);
    if (threadIdx.x == 0) block = here;
  } else if (threadIdx.x >= 128) {
    fill_statistics(workspace, smem);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      StagePair next;
      load_tiles<false, false>(params, maps, workspace, smem, block, false, 0, next);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    if (threadIdx.x < 256) {
      consume_wide_tiles<Config, Element, kGeneral, true>(params, smem, block);
    } else {
      consume_wide_tiles<Config, Element, kGeneral, false>(params, smem, block);
    }
  }
}

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

// Describes what a block of the second kernel works on.
struct WideQueryBlock {
  BatchIndex batch;
  Band band;
  TileRange range;
  const SegmentSpan* key_spans;  // or null
  SegmentSpan query_span;
  int32_t key_blocks, head, kv_head, row0, batch_index;

  template <int kBlockKv>
  __device__ __forceinline__ int32_t skip_to(int32_t candidate) const {
    if (key_spans == nullptr) return candidate;
    return next_tile<kBlockKv>(key_spans, key_blocks, query_span, candidate, range.end);
  }
};

// Starts the copies of the second kernel: Q, dO, and K and V tile by tile. Called by warp 0.
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
    load_tile_panels(smem.query(), maps.query, smem.query_full(), params.query, block.batch,
                     block.head, block.row0);
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
    load_tile_panels(smem.key(key_ring.stage), maps.key, key_full, params.key, block.batch,
                     block.kv_head, col0);
    key_ring.advance();
    if (first) {
      ptx::mbarrier_arrive_expect_tx(smem.dout_full(), Config::QueryTile::kBytes);
      load_tile_panels(smem.dout(), maps.dout, smem.dout_full(), params.dout, block.batch,
                       block.head, block.row0);
    }
    const uint32_t value_full = smem.value_full(value_ring.stage);
    ptx::mbarrier_wait(smem.value_empty(value_ring.stage), value_ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(value_full, Config::KeyTile::kBytes);
    load_tile_panels(smem.value(value_ring.stage), maps.value, value_full, params.value,
                     block.batch, block.kv_head, col0);
    value_ring.advance();
  }
  if (leader) {
    ptx::mbarrier_wait(smem.key_empty(key_ring.stage), key_ring.parity ^ 1);
    smem.tiles[key_ring.stage] = -1;
    ptx::mbarrier_arrive(smem.key_full(key_ring.stage));
  }
  ptx::griddepcontrol_wait();  // must not seem complete before the first kernel is
}

// Computes dQ of 64 rows over all key tiles, as a consumer of the second kernel.
template <typename Config, typename Element, bool kGeneral>
__device__ __forceinline__ void consume_key_tiles(const Backward& params,
                                                  const BackwardWorkspace& workspace,
                                                  const WideQuerySmem<Config>& smem,
                                                  const WideQueryBlock& block) {
  constexpr int kN = Config::kBlockKv / 8, kSteps = Config::kBlockKv / 16;
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
  // Zeroes keys and values that no row may attend to.
  const auto zero_unattended = [&](const typename Config::KeyTile& tile, int32_t tile_col0) {
    const int32_t first = max(0, band.lo) - tile_col0;
    const int32_t end = min(band.kv_len, band.q_len - 1 + band.hi) - tile_col0;
    if (first > 0 || (end < Config::kBlockKv && tile_col0 + end < shape.kv_len)) {
      zero_rows(tile, first, end, kWideZeroed + group);
    }
  };
  const auto prepare_key = [&](uint32_t stage, int32_t tile_col0) {
    zero_unattended(smem.key(stage), tile_col0);
    if constexpr (kGeneral) {
      clear_bad_key_rows<Config::kConsumerThreads, kWideConsumers, Element>(smem.key(stage),
                                                                            bad_keys_smem[stage]);
    }
  };
  if (col0 >= 0) {
    float lse_log2[1][2], delta[1][2];
    ptx::mbarrier_wait(smem.query_full(), 0);
    ptx::mbarrier_wait(smem.dout_full(), 0);
    const int32_t rows = band.q_len - block.row0;
    if (rows < Config::kBlockQ && band.q_len < shape.q_len) {
      zero_rows(smem.query(), 0, rows, kWideZeroed + group);
      zero_rows(smem.dout(), 0, rows, kWideZeroed + group);
    }
    // Rows beyond a head's last read the values of another head's rows, or of none: their results,
    // in rows of their own, are not stored.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index =
          (int64_t{block.batch_index} * shape.heads + block.head) * workspace.rows + warp_row0 +
          fragment_row(0, 2 * half);
      lse_log2[0][half] = __ldcg(workspace.lse_log2 + index);
      delta[0][half] = __ldcg(workspace.delta + index);
    }

    float scores[1][kN][4], dscores[1][kN][4];
    uint32_t rounded[kSteps][4];
    const auto start_dscores = [&] {
      start_product_k_major<Element, Config::kBlockKv>(
          dscores[0], rows_from(smem.dout(), group * 64), smem.value(value_ring.stage));
    };
    const auto await_value = [&](int32_t tile_col0) {
      ptx::mbarrier_wait(smem.value_full(value_ring.stage), value_ring.parity);
      zero_unattended(smem.value(value_ring.stage), tile_col0);
    };
    // Turns finished S into P.
    const auto soften = [&](uint32_t stage, int32_t tile_col0) {
      const ScoreGradient<kGeneral, 1, kN> gradient(params, block.batch, block.head, warp_row0,
                                                    tile_col0);
      if constexpr (kGeneral) mark_bad_keys<Config::kBlockKv>(scores, bad_keys_smem[stage], 0);
      if (kGeneral || !band.all_allowed(group_row0, min(group_row0 + 64, band.q_len), tile_col0,
                                        tile_col0 + Config::kBlockKv)) {
        gradient.mask(scores, band);
      }
      gradient.probabilities(scores[0], lse_log2[0], to_log2, 0, 0, kN);
    };
    const auto finish = [&](int32_t tile_col0) {
      arrive_by_warp(smem.value_empty(value_ring.stage));
      value_ring.advance();
      const ScoreGradient<kGeneral, 1, kN> gradient(params, block.batch, block.head, warp_row0,
                                                    tile_col0);
      gradient.finish(scores, dscores, lse_log2, delta);
    };

    prepare_key(0, col0);
    start_product_k_major<Element, Config::kBlockKv>(scores[0], rows_from(smem.query(), group * 64),
                                                     smem.key(0));
    await_value(col0);
    start_dscores();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores[0]);
    soften(0, col0);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(dscores[0]);
    finish(col0);
    do {
      round_fragments<Element>(rounded, dscores[0]);
      const uint32_t stage = key_ring.stage;
      start_product_add<Element, Config::kHeadDim>(dquery, rounded, smem.key(stage));
      key_ring.advance();
      ptx::mbarrier_wait(smem.key_full(key_ring.stage), key_ring.parity);
      col0 = smem.tiles[key_ring.stage];
      // Starts the next tile's S and dP; after the last tile it recomputes those of old stages and
      // discards them.
      if (col0 >= 0) prepare_key(key_ring.stage, col0);
      start_product_k_major<Element, Config::kBlockKv>(
          scores[0], rows_from(smem.query(), group * 64), smem.key(key_ring.stage));
      if (col0 >= 0) await_value(col0);
      start_dscores();
      ptx::wgmma_wait_group<2>();
      ptx::wgmma_results(dquery);
      arrive_by_warp(smem.key_empty(stage));
      ptx::wgmma_wait_group<1>();
      ptx::wgmma_results(scores[0]);
      if (col0 >= 0) soften(key_ring.stage, col0);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(dscores[0]);
      if (col0 >= 0) finish(col0);
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
  const TileRange range = kv_tiles<Config::kBlockKv>(band, row0, row0 + Config::kBlockQ);
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
