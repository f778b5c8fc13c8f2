// Defines the kernels that run before and after the main backward kernel. Memory bandwidth bounds
// both.
//   begin: computes delta = sum_h(dout * out) - dlse, and lse in the units of the logits; zeroes
//          the sums for dQ and the counters
//   end:   converts dQ from float32 sums in fragment order to its own type and layout
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/logits.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/math.cuh"
#include "ptx/tf32.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/chunk.cuh"
#include "tile/element.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// Defines the order of a tile's float32 sums for dQ in the workspace: blocks of 8 columns, each
// with the fragment elements of all lanes that have rows, 32 lanes for every 16 rows. The elements
// that a warp adds to a block are contiguous: one instruction of its 32 lanes adds to one
// contiguous line, or to four (sm_90).
template <int kRows, int kHeadDimension, int kWarpRows, int kWarpColumns>
struct DqueryOrder {
  static constexpr int kBlockQ = kRows, kHeadDim = kHeadDimension, kWarpCols = kWarpColumns;
  static constexpr int kM = kBlockQ / 16 / kWarpRows, kN = kHeadDim / 8 / kWarpCols;
  static_assert(kM * kN * kWarpCols * kWarpRows * 128 == kBlockQ * kHeadDim);

  int lanes, col_blocks;  // numbers of lanes and of blocks of columns in the tile

  // `rows` is the number of existing rows from the tile's first one on, and may exceed kBlockQ.
  __device__ __forceinline__ DqueryOrder(int32_t rows, int32_t head_dim)
      : lanes(fragment_lanes(min(rows, kBlockQ))), col_blocks(head_dim / 8) {}

  // Returns the n-th block of columns of a warp. The warps take two consecutive blocks at a time,
  // in turn.
  static __device__ __forceinline__ int col_block(int warp, int n) {
    return (n / 2 * kWarpCols + warp % kWarpCols) * 2 + n % 2;
  }
  // Returns the number, among all lanes of the tile, of a lane of a warp's m-th 16 rows.
  static __device__ __forceinline__ int tile_lane(int warp, int m, int lane) {
    return (warp / kWarpCols * kM + m) * 32 + lane;
  }
  // Return the offset of a lane's element 0, and the distance between its four elements. From sm_90
  // on, one instruction adds all four, so they are contiguous.
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ int offset(int block, int lane) const {
    return (block * lanes + lane) * 4;
  }
  static __device__ __forceinline__ int element_stride() { return 1; }
#else
  __device__ __forceinline__ int offset(int block, int lane) const {
    return block * lanes * 4 + lane;
  }
  __device__ __forceinline__ int element_stride() const { return lanes; }
#endif
};
template <typename Config>
using DqueryOrderOf = DqueryOrder<Config::kBlockQ, Config::kHeadDim, Config::kQueryWarpRows,
                                  Config::kWarps / Config::kQueryWarpRows>;

inline constexpr int kEdgeThreads = 256;

// Zeroes the sums for dquery of kMaxBlockQ rows, if the kernels have any.
template <typename Element>
__device__ __forceinline__ void zero_dquery(const Backward& params,
                                            const BackwardWorkspace& workspace,
                                            const BatchIndex& batch, int64_t batch_head,
                                            int32_t head, int32_t row0) {
  const Shape& shape = params.shape;
  if constexpr (kIsFloat32<Element>) {  // dquery itself holds the sums
    float* dquery = batch.pointer<float>(params.dquery, head);
    const int32_t end = min(row0 + kMaxBlockQ, shape.q_len);
    for (int32_t row = row0 + threadIdx.x / 32; row < end; row += kEdgeThreads / 32) {
      for (int32_t col = threadIdx.x % 32; col < shape.head_dim; col += 32) {
        dquery[row * params.dquery.row + col] = 0.0f;
      }
    }
  } else if (workspace.dquery) {
    float4* dquery = reinterpret_cast<float4*>(
        workspace.dquery + (batch_head * workspace.dquery_rows + row0) * shape.head_dim);
    const int zeros = min(workspace.dquery_rows - row0, kMaxBlockQ) * shape.head_dim;
    for (int i = threadIdx.x; i < zeros / 4; i += kEdgeThreads) {
      dquery[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

// Computes delta, and lse in the units of the logits, and zeroes sums and counters. The grid is
// batch x head x tiles of kMaxBlockQ rows.
template <typename Element>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_begin_kernel(const __grid_constant__ Backward params,
                          const BackwardWorkspace workspace) {
  const Shape& shape = params.shape;
  const int32_t tiles = (shape.q_len + kMaxBlockQ - 1) / kMaxBlockQ;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % tiles), row0 = tile * kMaxBlockQ;
  const int64_t batch_head = blockIdx.x / tiles;
  const int32_t head = static_cast<int32_t>(batch_head % shape.heads);
  const BatchIndex batch(shape, batch_head / shape.heads);
  const Band band(params, batch);

  zero_dquery<Element>(params, workspace, batch, batch_head, head, row0);
  const int32_t flag = tile * 4 + static_cast<int32_t>(threadIdx.x);  // a tile has at most four
  if (workspace.turns && threadIdx.x < 4 && flag < workspace.flags) {
    workspace.turns[batch_head * workspace.flags + flag] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x < kMaxBlockQ) {
    workspace.lse_log2[workspace.padding + threadIdx.x] = -minus_infinity();
    workspace.delta[workspace.padding + threadIdx.x] = 0.0f;
    if (workspace.ticket && threadIdx.x == 0) *workspace.ticket = 0;
  }

  // 8, 16 or 32 lanes read a row of up to 64, 128 or 256 elements. 32 lanes read a wider row in two
  // steps.
  const int lanes = shape.value_dim <= 64 ? 8 : shape.value_dim <= 128 ? 16 : 32;
  const int chunk = threadIdx.x % lanes;
  const Element* out = batch.pointer<const Element>(params.out, head);
  const Element* dout = batch.pointer<const Element>(params.dout, head);
  const float* lse = batch.pointer<const float>(params.lse, head);
  const float* dlse = params.dlse ? batch.pointer<const float>(params.dlse, head) : nullptr;
  for (int i = threadIdx.x / lanes; i < kMaxBlockQ; i += kEdgeThreads / lanes) {
    const int32_t row = row0 + i;
    float sum = 0.0f;
    if constexpr (kIsFloat32<Element>) {
      for (int32_t col = chunk; row < band.q_len && col < shape.value_dim; col += lanes) {
        float gradient = dout[row * params.dout.row + col].value;
        // dO is rounded as in dP, so that the rounding errors cancel where dP and delta nearly do.
        if constexpr (std::is_same_v<Element, Tf32>) {
          gradient =
              __uint_as_float(ptx::round_to_tf32(__float_as_uint(gradient)) & ptx::kTf32Bits);
        }
        sum = fmaf(out[row * params.out.row + col].value, gradient, sum);
      }
    } else {
      for (int32_t col = chunk * kChunk; row < band.q_len && col < shape.value_dim;
           col += lanes * kChunk) {
        sum += dot_product_of_chunk(out + row * params.out.row + col,
                                    dout + row * params.dout.row + col);
      }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (chunk != 0 || row >= workspace.rows) continue;
    const float row_lse = row < band.q_len ? lse[row * params.lse.row] : minus_infinity();
    const bool dead = row_lse == minus_infinity();
    const int64_t index = batch_head * workspace.rows + row;
    // lse gets the units of the logits: natural, or log2.
    workspace.lse_log2[index] =
        dead ? -minus_infinity() : row_lse * (in_natural_units(params) ? 1.0f : kLog2E);
    workspace.delta[index] = dead ? 0.0f : dlse ? sum - dlse[row * params.dlse.row] : sum;
  }
}

// Scales dQ and converts it to its own type. The grid is batch x head x query tiles.
template <typename Order, typename Element>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_end_kernel(const __grid_constant__ Backward params,
                        const BackwardWorkspace workspace) {
  constexpr int kChunks = Order::kHeadDim / kChunk;
  const Shape& shape = params.shape;
  const int32_t tiles = (shape.q_len + Order::kBlockQ - 1) / Order::kBlockQ;
  const int32_t row0 = static_cast<int32_t>(blockIdx.x % tiles) * Order::kBlockQ;
  const int64_t batch_head = blockIdx.x / tiles;
  const int32_t head = static_cast<int32_t>(batch_head % shape.heads);
  Element* dquery_gmem =
      BatchIndex(shape, batch_head / shape.heads).pointer<Element>(params.dquery, head);
  const float* accumulators =
      workspace.dquery + (batch_head * workspace.dquery_rows + row0) * shape.head_dim;
  const int32_t rows = min(shape.q_len - row0, Order::kBlockQ);
  const Order order(rows, shape.head_dim);
  const float scale = params.options.scale;
  for (int i = threadIdx.x; i < rows * kChunks; i += kEdgeThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk >= order.col_blocks) continue;
    const int first_lane = row / 16 * 32 + row % 8 * 4, half = row / 8 % 2;
    uint32_t pairs[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* pair =
          accumulators + order.offset(chunk, first_lane + t) + 2 * half * order.element_stride();
      pairs[t] = ptx::cvt_rn_x2<Element>(pair[0] * scale, pair[order.element_stride()] * scale);
    }
    *reinterpret_cast<uint4*>(dquery_gmem + (row0 + row) * params.dquery.row + chunk * kChunk) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace jax_flash::sm80
