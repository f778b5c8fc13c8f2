// Computes dK and dV for head dims above 128: the first kernel of sm90/backward/wide.cuh.
//
// A thread block owns 64 keys. Warp 0 is the producer (producer.cuh). Consumer warpgroup 0 computes
// P^T and dV, and stages P^T for consumer warpgroup 1, which computes dS^T and dK. WideKeyConfig
// has the shared-memory layout: K, V, and two stages each of Q, dO and P^T.
#pragma once

#include <cstdint>

#include "modifiers/score_gradient_transposed.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/backward/wide.cuh"
#include "sm90/fragments.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/quad.cuh"

namespace jax_flash::sm90 {

// Turns finished products S^T into P^T, which is also staged for the other warpgroup, or dP^T into
// dS^T.
template <typename Config, bool kGeneral, bool kScores, int kN>
__device__ __forceinline__ void refine_wide_products(const Backward& params,
                                                     const BackwardSmem<Config>& smem,
                                                     const BackwardBlock& block, int32_t col0,
                                                     int warp_key, float to_log2,
                                                     const RingState<Config::kStages>& at,
                                                     const int2& here, float (&products)[kN][4]) {
  const Band& band = block.band;
  const float* lse_smem = smem.lse + at.stage * Config::kBlockQ;
  const TransposedGradient<kGeneral ? kEveryModifier : kNoModifier, kN> gradient{
      params, block.batch, here.y, col0 + warp_key, here.x};
  const uint32_t staged = smem.staging(at.stage);
  const Kept kept = gradient.draw();
  if constexpr (kScores) {
    if (kGeneral || !band.all_allowed(here.x, min(here.x + Config::kBlockQ, band.q_len), col0,
                                      col0 + Config::kBlockKv)) {
      gradient.mask(products, band);
    }
    gradient.probabilities(products, ColumnsInShared(lse_smem), lse_smem, to_log2);
    ptx::mbarrier_wait(smem.staging_empty(at.stage), at.parity ^ 1);
    stage_accumulators(staged, products, threadIdx.x % 128);
    sync_and_arrive_warp(smem.staging_full(at.stage));
    if constexpr (kGeneral) gradient.drop(products, kept);
  } else {
    ptx::mbarrier_wait(smem.staging_full(at.stage), at.parity);
    float p[kN][4];
    load_staged(p, staged);
    sync_and_arrive_warp(smem.staging_empty(at.stage));
    gradient.finish(p, products, lse_smem, smem.delta + at.stage * Config::kBlockQ, kept);
  }
}

// Runs a consumer. kScores: warpgroup 0, which multiplies K by Q, then P^T by dO, and sums dV.
// Otherwise warpgroup 1, which multiplies V by dO, then dS^T by Q, and sums dK.
template <typename Config, typename Element, bool kGeneral, bool kScores>
__device__ __forceinline__ void consume_wide_tiles(const Backward& params,
                                                   const BackwardSmem<Config>& smem,
                                                   const BackwardBlock& block) {
  constexpr int kN = Config::kBlockQ / 8, kSteps = Config::kBlockQ / 16, kGroup = kScores ? 0 : 1;
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
  // Select an operand of a stage: `near` is multiplied by `own`, `far` by P^T or dS^T.
  const auto near = [&](uint32_t stage) { return kScores ? smem.query(stage) : smem.dout(stage); };
  const auto far = [&](uint32_t stage) { return kScores ? smem.dout(stage) : smem.query(stage); };
  float products[kN][4];
  uint32_t rounded[kSteps][4];
  if (!kScores) ptx::mbarrier_wait(smem.dout_full(0), 0);
  zero_padding(near(0), tile.x);
  start_product_k_major<Element, Config::kBlockQ>(products, own, near(0));
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_results(products);
  refine_wide_products<Config, kGeneral, kScores>(params, smem, block, col0, warp_key, to_log2,
                                                  ring, tile, products);
  do {
    round_fragments<Element>(rounded, products);
    const RingState<Config::kStages> at = ring;
    // dV += P^T dO or dK += dS^T Q
    if (kScores) ptx::mbarrier_wait(smem.dout_full(at.stage), at.parity);
    zero_padding(far(at.stage), tile.x);
    start_product_add<Element, Config::kHeadDim>(sum, rounded, far(at.stage));
    // Starts S^T or dP^T of the next tile. After the last tile, this computes that of an old stage,
    // which is discarded.
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
    sync_and_arrive_warp(smem.query_empty(at.stage));
    sync_and_arrive_warp(smem.dout_empty(at.stage));
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(products);
    if (tile.x >= 0)
      refine_wide_products<Config, kGeneral, kScores>(params, smem, block, col0, warp_key, to_log2,
                                                      ring, tile, products);
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
      ptx::griddepcontrol_wait();  // also without tiles: the next kernel waits for this one only
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

}  // namespace jax_flash::sm90
