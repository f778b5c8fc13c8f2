// Computes the forward pass for head dims from 257 to 512: see sm90/column_blocks.cuh.
//
// For each key tile, S = Q K^T, P = 2^(scale log2(e) S - m) with m the row's running maximum,
// and out += P V. The two consumer warpgroups compute P of alternate tiles, and each owns half of
// the columns of the output. The warpgroup that computes a tile's P publishes m. The other one
// rescales its half of the output to this m before it adds its product. Each warpgroup sums the
// exponentials of its own tiles; finish() adds the two sums.
#pragma once

#include <cstdint>

#include "modifiers/band.cuh"
#include "modifiers/sinks.cuh"
#include "params.h"
#include "sm90/backward/order.cuh"
#include "sm90/column_blocks.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Holds what the warpgroups exchange.
struct ForwardColumnsShared {
  float maxima[kColumnsRows];
  float sums[2][128][2];  // [warpgroup][thread][half]
};

// Implements the pass of consume_columns() for the forward kernel.
template <typename Element>
struct ForwardColumns {
  using Consumer = ColumnConsumer<ColumnConfig<1>, Element>;

  const Forward& params;
  const ColumnBlock& block;
  ForwardColumnsShared& shared;
  const float to_log2 = params.options.scale * kLog2E;
  const int32_t warp_row0 = block.own_row0 + threadIdx.x % 128 / 32 * 16;
  OnlineSoftmax<1> softmax;
  float factor[1][2];
  bool rises;

  __device__ __forceinline__ ForwardColumns(const Forward& call, const ColumnBlock& work,
                                            ForwardColumnsShared& exchanged)
      : params(call), block(work), shared(exchanged) {}

  // Returns the keys that some row of the block may attend to.
  __device__ __forceinline__ Range rows() const {
    const Band& band = block.band;
    const int32_t end = min(block.own_row0 + kColumnsRows, band.q_len);
    if (block.own_row0 >= end) return {0, INT32_MAX};  // nothing is stored
    const Range keys = {band.first_col(block.own_row0), band.end_col(end - 1)};
    return {keys.first, keys.end == params.shape.kv_len ? INT32_MAX : keys.end};
  }
  __device__ __forceinline__ void begin(int32_t, const ColumnTile&) {}
  __device__ __forceinline__ void weigh(const ColumnTile& tile,
                                        typename Consumer::Scores& products) {
    auto& scores = reinterpret_cast<float (&)[1][Consumer::kN][4]>(products);
    const Band& band = block.band;
    const int32_t row_end = block.own_row0 + kColumnsRows;
    if (!band.all_allowed(block.own_row0, row_end, tile.row0, tile.row0 + kColumnsRows)) {
      mask_band(scores, band, warp_row0, tile.row0);
    }
    rises = softmax.template raise_maximum<2>(scores, to_log2, factor);
#pragma unroll
    for (int n = 0; n < Consumer::kN; ++n) softmax.exponentials(scores[0][n], 0, to_log2);
  }
  __device__ __forceinline__ void rescale(typename Consumer::Sum& sum) {
    if (rises) {
      OnlineSoftmax<1>::rescale(reinterpret_cast<float (&)[1][Consumer::kSumN][4]>(sum), factor);
    }
  }
  __device__ __forceinline__ void publish() const {
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shared.maxima[warp_row0 - block.own_row0 + fragment_row(0, 2 * half)] =
          softmax.maximum[0][half];
    }
  }
  __device__ __forceinline__ void receive(typename Consumer::Sum& sum) {
    float greatest[2];
    bool changes = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      greatest[half] = shared.maxima[warp_row0 - block.own_row0 + fragment_row(0, 2 * half)];
      changes |= greatest[half] != softmax.maximum[0][half];
    }
    if (!__any_sync(0xffffffff, changes)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[0][half] = softmax.raise(0, half, greatest[half], to_log2);
    }
    OnlineSoftmax<1>::rescale(reinterpret_cast<float (&)[1][Consumer::kSumN][4]>(sum), factor);
  }
  // Adds the other warpgroup's sums, divides, and stores.
  __device__ __forceinline__ void finish(int group, typename Consumer::Sum& sum) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shared.sums[group][thread][half] = softmax.sum[0][half];
    }
    ptx::barrier_sync(kColumnsConsumers, 256);
    const Shape& shape = params.shape;
    const float sink_log2 = read_sink(
        bool{params.sinks}, block.batch.pointer<const float>(params.sinks, block.own_head));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.sum[0][half] += shared.sums[1 - group][thread][half];
      const int32_t row = warp_row0 + fragment_row(0, 2 * half);
      float lse, normalizer;
      softmax.finish(0, half, to_log2, sink_log2, lse, normalizer);
      const bool dead = row >= block.band.q_len || normalizer == 0.0f;
      if (group == 0 && threadIdx.x % 4 == 0 && row < shape.q_len) {
        block.batch.pointer<float>(params.lse, block.own_head)[row * params.lse.row] =
            row >= block.band.q_len ? minus_infinity() : lse;
      }
#pragma unroll
      for (int n = 0; n < Consumer::kSumN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          sum[n][e] = dead ? 0.0f : sum[n][e] * normalizer;
        }
      }
    }
    const int col0 = group * ColumnConfig<1>::kSumCols;
    store_rows(block.batch.pointer<Element>(params.out, block.own_head) +
                   warp_row0 * params.out.row + col0,
               params.out.row, shape.q_len - warp_row0, shape.value_dim - col0, 1.0f, sum);
  }
};

// The grid is clusters of 128 query rows x heads x batch.
template <typename Element>
__global__ void __cluster_dims__(kColumnsCluster, 1, 1)
    __launch_bounds__(ColumnConfig<1>::kThreads, 1)
        forward_columns_kernel(const __grid_constant__ Forward params,
                               const __grid_constant__ ColumnOperands<1> operands,
                               const __grid_constant__ TileSchedule schedule) {
  using Config = ColumnConfig<1>;
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[ColumnSmem<Config>::kBarriers];
  __shared__ __align__(16) uint8_t block_bytes_smem[sizeof(ColumnBlock)];
  __shared__ ForwardColumnsShared shared;
  ColumnBlock& block = *reinterpret_cast<ColumnBlock*>(block_bytes_smem);
  const ColumnSmem<Config> smem{ptx::shared_address(tiles_smem),
                                ptx::shared_address(barriers_smem)};
  if (threadIdx.x == 0) {
    const Shape& shape = params.shape;
    int32_t row0;
    block.start(params, schedule, shape.heads, row0);
    block.stream(block.own_head / (shape.heads / shape.kv_heads), 1,
                 kv_tiles<kColumnsRows>(block.band, row0, row0 + kColumnsRows * kColumnsCluster));
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
    ColumnConsumer<Config, Element> consumer(
        smem, __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1);
    ForwardColumns<Element> pass(params, block, shared);
    typename ColumnConsumer<Config, Element>::Sum sum;
    consume_columns(operands, block, consumer, sum, pass);
    pass.finish(consumer.group, sum);
  }
  __syncwarp();
  ptx::cluster_sync();  // no block ends while the other one copies to it
}

template <typename Element>
Status launch_forward_columns(const Forward& params, cudaStream_t stream) {
  using Config = ColumnConfig<1>;
  const Shape& shape = params.shape;
  ColumnOperands<1> operands;
  Status status = operands.own[0].make("query", shape, params.query, true, shape.head_dim, 64);
  if (status.ok()) {
    status = operands.first[0].make("key", shape, params.key, false, shape.head_dim, 32);
  }
  if (status.ok()) {
    status = operands.second.make("value", shape, params.value, false, shape.value_dim, 16);
  }
  if (!status.ok()) return status;
  const int64_t tiles = ceil_div(shape.q_len, kColumnsRows * kColumnsCluster);
  const int64_t heads = shape.batch * shape.heads;
  return launch_kernel("sm90::forward_columns_kernel", shape, forward_columns_kernel<Element>,
                       tiles * heads * kColumnsCluster, Config::kThreads, Config::kSmemBytes,
                       stream, params, operands, column_schedule(params, tiles, heads, true));
}

}  // namespace jax_flash::sm90
