// Computes the backward pass for head dims from 257 to 512. sm90/column_blocks.cuh has the
// products, the roles of warps and the shared-memory map.
//
// The accumulators of dK and dV, or of dQ, of 64 rows take half of the registers of a
// multiprocessor. Therefore there are three kernels, and none adds in device memory:
//
//   dV   S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - lse),              dV += P^T dO
//   dK   S^T and dP^T = V dO^T,  dS^T = P^T (dP^T - delta),            dK += dS^T Q
//   dQ   S and dP = dO V^T,  dS = P (dP - delta),                      dQ += dS K
//
// These are eight products, instead of the five that the pass needs. The blocks of a kernel start
// on multiprocessors that the kernel before leaves idle. All three kernels are deterministic.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/score_gradient.cuh"
#include "modifiers/score_gradient_transposed.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/column_blocks.cuh"
#include "sm90/kernels.h"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"
#include "tile/quad.cuh"

namespace jax_flash::sm90 {

enum class ColumnGradient { kValues, kKeys, kQueries };

template <ColumnGradient kGradient>
using GradientColumnConfig = ColumnConfig<kGradient == ColumnGradient::kValues ? 1 : 2>;

// Holds lse and delta of a tile's queries, for each warpgroup, for the current tile and the next.
using ColumnStatistics = float[2][2][2 * kColumnsRows];

// Implements the pass of consume_columns() for dK and dV.
template <typename Element, ColumnGradient kGradient>
struct KeyColumns {
  static constexpr bool kKeys = kGradient == ColumnGradient::kKeys;
  using Consumer = ColumnConsumer<GradientColumnConfig<kGradient>, Element>;

  const Backward& params;
  const BackwardWorkspace& workspace;
  const ColumnBlock& block;
  float (&statistics)[2][2 * kColumnsRows];
  const float to_log2 = params.options.scale * kLog2E;
  const int32_t warp_key0 = block.own_row0 + threadIdx.x % 128 / 32 * 16;
  float statistic;
  int buffer = 0;

  __device__ __forceinline__ KeyColumns(const Backward& call, const BackwardWorkspace& space,
                                        const ColumnBlock& work, ColumnStatistics& shared,
                                        int group)
      : params(call), workspace(space), block(work), statistics(shared[group]) {}

  __device__ __forceinline__ Range rows() const {
    return {0, block.band.q_len == params.shape.q_len ? INT32_MAX : block.band.q_len};
  }
  __device__ __forceinline__ TransposedGradient<kNoModifier, Consumer::kN> gradient_at(
      const ColumnTile& tile) const {
    return {params, block.batch, tile.head, warp_key0, tile.row0};
  }
  // Loads lse or delta of one query per thread.
  __device__ __forceinline__ void begin(int32_t index, const ColumnTile& tile) {
    const int thread = threadIdx.x % 128;
    const float* values = thread < kColumnsRows ? workspace.lse_log2 : workspace.delta;
    const int64_t batch_head = int64_t{block.batch_index} * params.shape.heads + tile.head;
    statistic = __ldcg(values + workspace.row_index(batch_head, tile.row0 + thread % kColumnsRows));
    buffer = index / 2 % 2;
  }
  __device__ __forceinline__ void weigh(const ColumnTile& tile,
                                        typename Consumer::Scores& scores) const {
    float* const lse = statistics[buffer];
    lse[threadIdx.x % 128] = statistic;
    ptx::barrier_sync(kColumnsGroup + static_cast<int>(threadIdx.x) / 128 - 1, 128);
    const Band& band = block.band;
    const int32_t row_end = tile.row0 + kColumnsRows;
    const auto gradient = gradient_at(tile);
    if (row_end > band.q_len ||
        !band.all_allowed(tile.row0, row_end, block.own_row0, block.own_row0 + kColumnsRows)) {
      gradient.mask(scores, band);
    }
    gradient.probabilities(scores, ColumnsInShared(lse), lse, to_log2);
  }
  __device__ __forceinline__ void find_gradient(const typename Consumer::Scores& p,
                                                typename Consumer::Scores& dp) const {
    const float* const lse = statistics[buffer];
    const auto gradient = gradient_at({});
    gradient.template finish<true>(p, dp, lse, lse + kColumnsRows, gradient.draw());
  }
  __device__ __forceinline__ void rescale(typename Consumer::Sum&) {}
  __device__ __forceinline__ void publish() const {}
  __device__ __forceinline__ void receive(typename Consumer::Sum&) {}
  __device__ __forceinline__ void finish(int group, typename Consumer::Sum& sum) const {
    const Operand& gradient = kKeys ? params.dkey : params.dvalue;
    const int32_t cols = kKeys ? params.shape.head_dim : params.shape.value_dim;
    const int32_t col0 = group * ColumnConfig<1>::kSumCols;
    store_rows(block.batch.template pointer<Element>(gradient, block.own_head) +
                   warp_key0 * gradient.row + col0,
               gradient.row, params.shape.kv_len - warp_key0, cols - col0,
               kKeys ? params.options.scale : 1.0f, sum);
  }
};

// Implements the pass of consume_columns() for dQ.
template <typename Element>
struct QueryColumns {
  using Consumer = ColumnConsumer<ColumnConfig<2>, Element>;

  const Backward& params;
  const ColumnBlock& block;
  const float to_log2 = params.options.scale * kLog2E;
  const int32_t warp_row0 = block.own_row0 + threadIdx.x % 128 / 32 * 16;
  float lse[2], delta[2];

  __device__ __forceinline__ QueryColumns(const Backward& call, const BackwardWorkspace& workspace,
                                          const ColumnBlock& work, ColumnStatistics&, int)
      : params(call), block(work) {
    const int64_t batch_head = int64_t{block.batch_index} * params.shape.heads + block.own_head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index = workspace.row_index(batch_head, warp_row0 + fragment_row(0, 2 * half));
      lse[half] = __ldcg(workspace.lse_log2 + index);
      delta[half] = __ldcg(workspace.delta + index);
    }
  }

  // Keys that no row may attend to are not read.
  __device__ __forceinline__ Range rows() const {
    const Band& band = block.band;
    const int32_t end = min(band.kv_len, band.q_len - 1 + band.hi);
    return {max(0, band.lo), end == params.shape.kv_len ? INT32_MAX : end};
  }
  __device__ __forceinline__ void begin(int32_t, const ColumnTile&) {}
  __device__ __forceinline__ void weigh(const ColumnTile& tile,
                                        typename Consumer::Scores& products) const {
    const Band& band = block.band;
    auto& scores = reinterpret_cast<float (&)[1][Consumer::kN][4]>(products);
    if (!band.all_allowed(block.own_row0, block.own_row0 + kColumnsRows, tile.row0,
                          tile.row0 + kColumnsRows)) {
      mask_band(scores, band, warp_row0, tile.row0);
    }
    const ScoreGradient<false, 1, Consumer::kN, Element> gradient(
        params, block.batch, block.own_head, warp_row0, tile.row0);
    gradient.probabilities(products, lse, to_log2, 0, 0, Consumer::kN);
  }
  // A key that the row may not attend to may be NaN, and so may its dP.
  __device__ __forceinline__ void find_gradient(const typename Consumer::Scores& p,
                                                typename Consumer::Scores& dp) const {
#pragma unroll
    for (int n = 0; n < Consumer::kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dp[n][e] = p[n][e] == 0.0f ? 0.0f : p[n][e] * (dp[n][e] - delta[e / 2]);
      }
    }
  }
  __device__ __forceinline__ void rescale(typename Consumer::Sum&) {}
  __device__ __forceinline__ void publish() const {}
  __device__ __forceinline__ void receive(typename Consumer::Sum&) {}
  __device__ __forceinline__ void finish(int group, typename Consumer::Sum& sum) const {
    const Shape& shape = params.shape;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (warp_row0 + fragment_row(0, 2 * half) < block.band.q_len) continue;
#pragma unroll
      for (int n = 0; n < Consumer::kSumN; ++n) sum[n][2 * half] = sum[n][2 * half + 1] = 0.0f;
    }
    const int32_t col0 = group * ColumnConfig<2>::kSumCols;
    store_rows(block.batch.pointer<Element>(params.dquery, block.own_head) +
                   warp_row0 * params.dquery.row + col0,
               params.dquery.row, shape.q_len - warp_row0, shape.head_dim - col0,
               params.options.scale, sum);
  }
};

// The grid is clusters of 128 keys, or queries, x heads x batch.
template <typename Element, ColumnGradient kGradient>
__global__ void __cluster_dims__(kColumnsCluster, 1, 1)
    __launch_bounds__(GradientColumnConfig<kGradient>::kThreads, 1) backward_columns_kernel(
        const __grid_constant__ Backward params,
        const __grid_constant__ ColumnOperands<GradientColumnConfig<kGradient>::kOwn> operands,
        const BackwardWorkspace workspace, const __grid_constant__ TileSchedule schedule) {
  using Config = GradientColumnConfig<kGradient>;
  constexpr bool kQueries = kGradient == ColumnGradient::kQueries;
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[ColumnSmem<Config>::kBarriers];
  __shared__ __align__(16) uint8_t block_bytes_smem[sizeof(ColumnBlock)];
  __shared__ ColumnStatistics statistics;
  ColumnBlock& block = *reinterpret_cast<ColumnBlock*>(block_bytes_smem);
  const ColumnSmem<Config> smem{ptx::shared_address(tiles_smem),
                                ptx::shared_address(barriers_smem)};
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x == 0) {
    constexpr int32_t kRows = kColumnsRows * kColumnsCluster;
    const Shape& shape = params.shape;
    const int32_t group = shape.heads / shape.kv_heads;
    int32_t row0;
    block.start(params, schedule, kQueries ? shape.heads : shape.kv_heads, row0);
    if (kQueries) {
      block.stream(block.own_head / group, 1,
                   kv_tiles<kColumnsRows>(block.band, row0, row0 + kRows));
    } else {
      block.stream(block.own_head * group, group,
                   q_tiles<kColumnsRows>(block.band, row0, row0 + kRows));
    }
    smem.init_barriers();
  }
  __syncthreads();
  ptx::cluster_sync();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x % 32 == 0 && threadIdx.x < 64) {
      ColumnProducer<Config>{operands, smem, block, static_cast<int>(threadIdx.x) / 32}.run();
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    using Pass =
        std::conditional_t<kQueries, QueryColumns<Element>, KeyColumns<Element, kGradient>>;
    ColumnConsumer<Config, Element> consumer(
        smem, __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1);
    Pass pass(params, workspace, block, statistics, consumer.group);
    typename ColumnConsumer<Config, Element>::Sum sum;
    consume_columns(operands, block, consumer, sum, pass);
    pass.finish(consumer.group, sum);
  }
  __syncwarp();
  ptx::cluster_sync();         // no block ends while the other one copies to it
  ptx::griddepcontrol_wait();  // must not complete before the previous kernel
}

// Launches one of the three kernels. `own`, `first` and `second`: see column_blocks.cuh.
template <typename Element, ColumnGradient kGradient>
Status launch_columns_gradient(const Backward& params, const BackwardWorkspace& workspace,
                               bool dependent, cudaStream_t stream) {
  using Config = GradientColumnConfig<kGradient>;
  constexpr bool kQueries = kGradient == ColumnGradient::kQueries;
  const Shape& shape = params.shape;
  ColumnOperands<Config::kOwn> operands;
  Status status;
  const auto make = [&](ColumnOperand& to, const char* name, const Operand& from, bool of_queries,
                        int32_t cols, int rows) {
    if (status.ok()) status = to.make(name, shape, from, of_queries, cols, rows);
  };
  // S is a product of Q and K, dP of dO and V.
  const auto make_both = [&](ColumnOperand& query, ColumnOperand& key, int i) {
    const int query_rows = kQueries ? 64 : 32, key_rows = kQueries ? 32 : 64;
    make(query, i ? "dout" : "query", i ? params.dout : params.query, true,
         i ? shape.value_dim : shape.head_dim, query_rows);
    make(key, i ? "value" : "key", i ? params.value : params.key, false,
         i ? shape.value_dim : shape.head_dim, key_rows);
  };
  for (int i = 0; i < Config::kOwn; ++i) {
    make_both(kQueries ? operands.own[i] : operands.first[i],
              kQueries ? operands.first[i] : operands.own[i], i);
  }
  if (kQueries) {
    make(operands.second, "key", params.key, false, shape.head_dim, 16);
  } else if (kGradient == ColumnGradient::kKeys) {
    make(operands.second, "query", params.query, true, shape.head_dim, 16);
  } else {
    make(operands.second, "dout", params.dout, true, shape.value_dim, 16);
  }
  if (!status.ok()) return status;
  const int64_t tiles =
      ceil_div(kQueries ? shape.q_len : shape.kv_len, kColumnsRows * kColumnsCluster);
  const int64_t heads = shape.batch * (kQueries ? shape.heads : shape.kv_heads);
  return launch_grid(dependent, "sm90::backward_columns_kernel", shape,
                     backward_columns_kernel<Element, kGradient>, tiles * heads * kColumnsCluster,
                     Config::kThreads, Config::kSmemBytes, stream, params, operands, workspace,
                     column_schedule(params, tiles, heads, kQueries));
}

template <typename Element>
Status launch_backward_columns(const Backward& params, const BackwardWorkspace& workspace,
                               cudaStream_t stream) {
  Status status = launch_backward_begin<Element>(params, workspace, {}, false, {}, stream);
  if (status.ok()) {
    status =
        launch_columns_gradient<Element, ColumnGradient::kKeys>(params, workspace, false, stream);
  }
  if (status.ok()) {
    status =
        launch_columns_gradient<Element, ColumnGradient::kQueries>(params, workspace, true, stream);
  }
  if (!status.ok()) return status;
  return launch_columns_gradient<Element, ColumnGradient::kValues>(params, workspace, true, stream);
}

}  // namespace jax_flash::sm90
