// Computes a bias's gradient by warpgroup-level products, up to head dim 128: what
// modifiers/bias_gradient.cuh does, for tiles of 128 queries and 128 keys.
//
//   for each batch and head that add to the block's tile of dbias
//     S = Q K^T                64 queries of a consumer by 128 keys
//     P = exp(S + bias - lse)  and whatever else the call has
//     dP = dO V^T
//     dbias += P (dP - delta)  registers
//
// Warp roles: one thread of warp 0 copies pairs of tiles (TMA) through a ring, Q and K, then dO and
// V; two consumer warpgroups own 64 queries each, and neither waits for the other.
//
// Shared memory holds kStages pairs of tiles; at the end, sums over rows where dbias has one row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "modifiers/bias_gradient.cuh"
#include "modifiers/score_gradient.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/fragments.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/schedule.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

template <int kHeadDimension>
struct BiasGradientConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kBlock = 128, kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  using Tile = SmemTile<kBlock, kHeadDim>;
  static constexpr int kPairBytes = 2 * Tile::kBytes;
  static constexpr int kStages = std::min(4, (kBackwardSmemLimit - 4096) / kPairBytes);
  static_assert(kStages >= 2);
  static constexpr int kSmemBytes = kStages * kPairBytes;
};

// Names a tile of logits that adds to the block's tile of dbias.
struct BiasStep {
  BatchIndex batch;
  Band band;
  int64_t batch_index;
  int32_t head, row0, col0;
};

// Visits the steps of a block in order, as all of its warps do. The same thread of each calls it.
struct BiasSteps {
  const Backward& params;
  const BackwardWorkspace& workspace;
  const BiasOwnership& ownership;
  int64_t own_batch;
  int32_t own_head, own_row, own_col;

  __device__ __forceinline__ BiasSteps(const Backward& backward, const BackwardWorkspace& space,
                                       const BiasOwnership& owned)
      : params(backward), workspace(space), ownership(owned) {
    int64_t block = blockIdx.x;
    own_col = static_cast<int32_t>(block % owned.owned_col_tiles);
    block /= owned.owned_col_tiles;
    own_row = static_cast<int32_t>(block % owned.owned_row_tiles);
    block /= owned.owned_row_tiles;
    own_head = static_cast<int32_t>(block % owned.owned_heads);
    own_batch = block / owned.owned_heads;
  }

  template <int kBlock, typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    const BiasOwnership& own = ownership;
    for (int64_t sum_batch = 0; sum_batch < own.summed; ++sum_batch) {
      const int64_t batch_index =
          BiasOwnership::batch_index(params.shape, params.dbias, own_batch, sum_batch);
      const BatchIndex batch(params.shape, batch_index);
      const Band band(params, batch);
      for (int32_t row = own_row; row < own.row_tiles; row += own.owned_row_tiles) {
        for (int32_t col = own_col; col < own.col_tiles; col += own.owned_col_tiles) {
          if (!attends<kBlock>(band, batch_index, row, col)) continue;
          for (int32_t head = own_head; head < own.heads; head += own.owned_heads) {
            visit(BiasStep{batch, band, batch_index, head, row * kBlock, col * kBlock});
          }
        }
      }
    }
  }

 private:
  // Returns whether any row of a tile may attend to any key of one.
  template <int kBlock>
  __device__ __forceinline__ bool attends(const Band& band, int64_t batch_index, int32_t row,
                                          int32_t col) const {
    const TileRange range = kv_tiles<kBlock>(band, row * kBlock, (row + 1) * kBlock);
    if (col < range.first || col >= range.end) return false;
    const SegmentSpans& spans = workspace.spans;
    if (!spans.query) return true;
    const auto of = [&](const SegmentSpan* all, int32_t blocks, int32_t tile) {
      return tile_span<kBlock>(all + batch_index * blocks, blocks, tile);
    };
    return of(spans.query, spans.query_blocks, row).meets(of(spans.key, spans.key_blocks, col));
  }
};

// Copies the pairs of all steps. Called by one thread.
template <typename Config>
__device__ __forceinline__ void load_pairs(const BiasSteps& steps, const BackwardMaps& maps,
                                           uint32_t root, uint32_t full, uint32_t empty) {
  using Tile = typename Config::Tile;
  const Backward& params = steps.params;
  RingState<Config::kStages> ring;
  const int32_t group = params.shape.heads / params.shape.kv_heads;
  steps.template for_each<Config::kBlock>([&](const BiasStep& step) {
    const auto load = [&](const CUtensorMap& rows, const Operand& row_operand,
                          const CUtensorMap& cols, const Operand& col_operand) {
      const uint32_t barrier = full + ring.stage * 8;
      ptx::mbarrier_wait(empty + ring.stage * 8, ring.parity ^ 1);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive_expect_tx(barrier, Config::kPairBytes);
      const int32_t at = ring.stage * Config::kPairBytes;
      load_tile_panels(Tile{root, static_cast<uint32_t>(at)}, rows, barrier, row_operand,
                       step.batch, step.head, step.row0);
      load_tile_panels(Tile{root, static_cast<uint32_t>(at + Tile::kBytes)}, cols, barrier,
                       col_operand, step.batch, step.head / group, step.col0);
      ring.advance();
    };
    load(maps.query, params.query, maps.key, params.key);
    load(maps.dout, params.dout, maps.value, params.value);
  });
}

// Sums dbias of a consumer's 64 queries and 128 keys over all steps. kModifiers: kBias if there is
// no other.
template <typename Config, typename Element, uint32_t kModifiers>
struct BiasConsumer {
  static constexpr int kN = Config::kBlock / 8;
  using Tile = typename Config::Tile;
  using Sums = float[1][kN][4];

  const BiasSteps& steps;
  const uint32_t root, full, empty;
  const int group;  // 0 or 1

  __device__ __forceinline__ void run(Sums& total) const {
    RingState<Config::kStages> ring;
    const Backward& params = steps.params;
    steps.template for_each<Config::kBlock>([&](const BiasStep& step) {
      const int32_t row0 = step.row0 + group * 64 + threadIdx.x % 128 / 32 * 16;
      float lse[1][2], delta[1][2];
      read_statistics(step, row0, lse[0], delta[0]);
      Sums scores, dscores;
      multiply(scores[0], ring);
      const ScoreGradient<true, 1, kN, Element> gradient(params, step.batch, step.head, row0,
                                                         step.col0);
      modify_tile<kModifiers>(scores, params, step.batch, step.head, step.band, row0, step.col0);
      gradient.probabilities(scores[0], lse[0], 1.0f, 0, 0, kN);
      multiply(dscores[0], ring);
      if constexpr (kModifiers != kBias) gradient.finish(scores, dscores, lse, delta);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float ds = dscores[0][n][e];
          if constexpr (kModifiers == kBias) {
            // An element that is not allowed has P = 0 whatever dP is.
            const float p = scores[0][n][e];
            ds = p == 0.0f ? 0.0f : p * (ds - delta[0][e / 2]);
          }
          total[0][n][e] += ds;
        }
      }
    });
  }

 private:
  __device__ __forceinline__ void read_statistics(const BiasStep& step, int32_t row0,
                                                  float (&lse)[2], float (&delta)[2]) const {
    const BackwardWorkspace& workspace = steps.workspace;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index =
          workspace.row_index(step.batch_index * steps.params.shape.heads + step.head,
                              row0 + fragment_row(0, 2 * half));
      lse[half] = workspace.lse_log2[index];
      delta[half] = workspace.delta[index];
    }
  }
  // Multiplies the next pair of tiles, and releases it.
  __device__ __forceinline__ void multiply(float (&products)[kN][4],
                                           RingState<Config::kStages>& ring) const {
    const uint32_t at = ring.stage * Config::kPairBytes;
    const Tile rows{root, at}, cols{root, at + Tile::kBytes};
    ptx::mbarrier_wait(full + ring.stage * 8, ring.parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 16; ++k) {
      ptx::Wgmma<Element, Config::kBlock>::template ss<0, 0>(
          products, descriptor_k_major(rows, group * 64, k), descriptor_k_major(cols, 0, k), k > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(products);
    arrive_by_warp(empty + ring.stage * 8);
    ring.advance();
  }
};

// Sums over a tile's rows in a fixed order, by both consumers. All rows then hold the sum.
template <typename Config, int kN>
__device__ __forceinline__ void sum_bias_rows(float (&total)[kN][4], float* partial_smem) {
  constexpr int kWarps = 4 * Config::kConsumers;
  const int warp = threadIdx.x / 32 - 4;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = total[n][e] + total[n][e + 2];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      if (threadIdx.x % 32 < 4) partial_smem[warp * Config::kBlock + fragment_col(n, e)] = sum;
    }
  }
  ptx::barrier_sync(kConsumers, 128 * Config::kConsumers);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = 0.0f;
#pragma unroll 1
      for (int other = 0; other < kWarps; ++other) {
        sum += partial_smem[other * Config::kBlock + fragment_col(n, e)];
      }
      total[n][e] = sum;
    }
  }
}

// Writes a consumer's part of the block's tile.
template <typename Config, int kN>
__device__ __forceinline__ void store_bias_gradient(const BiasSteps& steps,
                                                    float (&total)[1][kN][4], int group,
                                                    float* partial_smem) {
  const Shape& shape = steps.params.shape;
  const Operand& dbias = steps.params.dbias;
  if (dbias.row == 0) sum_bias_rows<Config>(total[0], partial_smem);
  if (dbias.col == 0) sum_cols(total);
  const BatchIndex batch(shape, BiasOwnership::batch_index(shape, dbias, steps.own_batch, 0));
  const int64_t base = batch.offset(dbias) + steps.own_head * dbias.head;
  const int32_t row_end = dbias.row ? shape.q_len : 1, col_end = dbias.col ? shape.kv_len : 1;
  const int32_t row0 = steps.own_row * Config::kBlock + group * 64 + threadIdx.x % 128 / 32 * 16;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t row = row0 + fragment_row(0, e);
      const int32_t col = steps.own_col * Config::kBlock + fragment_col(n, e);
      if (row < row_end && col < col_end) {
        store_float(dbias, base + row * dbias.row + col * dbias.col, total[0][n][e]);
      }
    }
  }
}

template <typename Config, typename Element, uint32_t kModifiers>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_bias_gradient_kernel(const __grid_constant__ Backward params,
                              const __grid_constant__ BackwardMaps maps,
                              const BackwardWorkspace workspace,
                              const __grid_constant__ BiasOwnership ownership) {
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[2 * Config::kStages];
  const uint32_t root = ptx::shared_address(tiles_smem);
  const uint32_t full = ptx::shared_address(barriers_smem), empty = full + 8 * Config::kStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(full + stage * 8, 1);
      ptx::mbarrier_init(empty + stage * 8, Config::kConsumers * 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const BiasSteps steps(params, workspace, ownership);
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x == 0) load_pairs<Config>(steps, maps, root, full, empty);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1;
    float total[1][Config::kBlock / 8][4];
    clear(total[0]);
    BiasConsumer<Config, Element, kModifiers>{steps, root, full, empty, group}.run(total);
    // All copies have arrived and been read by now, but perhaps not by the other consumer.
    ptx::barrier_sync(kConsumers, 128 * Config::kConsumers);
    store_bias_gradient<Config>(steps, total, group, reinterpret_cast<float*>(tiles_smem));
  }
}

// Launches it if dbias has enough tiles for all multiprocessors; else returns false in `launched`.
template <typename Element, int kHeadDim>
Status launch_wide_bias_gradient(const Backward& params, const BackwardWorkspace& workspace,
                                 cudaStream_t stream, bool& launched) {
  using Config = BiasGradientConfig<kHeadDim>;
  launched = false;
  if (!params.dbias) return {};
  const BiasOwnership ownership(params.shape, params.dbias, Config::kBlock);
  int sms = 0;
  Status status = multiprocessors(sms);
  if (!status.ok() || ownership.blocks() < sms) return status;
  BackwardMaps maps;
  status = make_backward_maps(params, Config::kBlock, Config::kBlock, maps);
  if (!status.ok()) return status;
  launched = true;
  const auto launch = [&](auto* kernel) {
    return launch_kernel("sm90::wide_bias_gradient_kernel", params.shape, kernel,
                         ownership.blocks(), Config::kThreads, Config::kSmemBytes, stream, params,
                         maps, workspace, ownership);
  };
  return modifiers_of(params) == kBias
             ? launch(wide_bias_gradient_kernel<Config, Element, kBias>)
             : launch(wide_bias_gradient_kernel<Config, Element, kEveryModifier>);
}

}  // namespace jax_flash::sm90
