// What goes before and after the main backward kernels, both bound by memory bandwidth:
//   before: delta = sum_h(dout * out) - dlse, lse in log2 units, accumulators set to zero
//   after:  dquery from float32 accumulators, in fragment order, to its own type and layout
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"
#include "sm80/workspace.h"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/quad.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

using sm80::BackwardWorkspace;

inline constexpr int kEdgeThreads = 256;
inline constexpr int kEdgeRows = 32;  // for which there is a turn

// Grid: batch x head x tiles of kRows rows. `dquery_cols` accumulators a row. What is written first
// needs nothing that is read, and the rows of several iterations are under way at a time.
template <typename Element, int kRows>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_begin_kernel(const __grid_constant__ Backward params,
                          const BackwardWorkspace workspace, int32_t dquery_cols) {
  static_assert(kRows % kEdgeRows == 0 && sm80::kRowPadding % kRows == 0);
  ptx::griddepcontrol_launch_dependents();
  const Shape& shape = params.shape;
  const uint32_t tiles = static_cast<uint32_t>(workspace.rows / kRows);
  const int32_t batch_head = static_cast<int32_t>(blockIdx.x / tiles);
  const int32_t row0 = static_cast<int32_t>(blockIdx.x - batch_head * tiles) * kRows;
  const int64_t row_index = int64_t{batch_head} * workspace.rows + row0;
  float4* dquery = reinterpret_cast<float4*>(workspace.dquery + row_index * dquery_cols);
  for (int i = threadIdx.x; i < kRows * dquery_cols / 4; i += kEdgeThreads) {
    dquery[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (workspace.turns && threadIdx.x < kRows / kEdgeRows) {
    workspace.turns[row_index / kEdgeRows + threadIdx.x] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if (workspace.turns) *workspace.ticket = 0;
    // See choose_blocks().
    if (dquery_cols > 0) *static_cast<int32_t*>(params.dquery.data) = 0;
  }

  const int32_t batch_index = batch_head / static_cast<int32_t>(shape.heads);
  const int32_t head = batch_head - batch_index * static_cast<int32_t>(shape.heads);
  const BatchIndex batch(shape, batch_index);
  const Band band(params, batch);
  // 8, 16 or 32 lanes read a row of up to 64, 128 or 256 elements.
  const int lanes = shape.value_dim <= 64 ? 8 : shape.value_dim <= 128 ? 16 : 32;
  const int chunk = threadIdx.x % lanes;
  const bool chunk_valid = chunk * kChunk < shape.value_dim;
  const Element* out = batch.pointer<const Element>(params.out, head) + chunk * kChunk;
  const Element* dout = batch.pointer<const Element>(params.dout, head) + chunk * kChunk;
  const float* lse = batch.pointer<const float>(params.lse, head);
  const float* dlse = params.dlse ? batch.pointer<const float>(params.dlse, head) : nullptr;
  const int rows_at_a_time = kEdgeThreads / lanes;
  constexpr int kBatch = kRows / kEdgeRows;
  for (int i0 = threadIdx.x / lanes; i0 < kRows; i0 += kBatch * rows_at_a_time) {
    uint4 a[kBatch] = {}, b[kBatch] = {};
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int32_t row = row0 + i0 + u * rows_at_a_time;
      if (row >= band.q_len || !chunk_valid) continue;
      a[u] = *reinterpret_cast<const uint4*>(out + row * params.out.row);
      b[u] = *reinterpret_cast<const uint4*>(dout + row * params.dout.row);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int i = i0 + u * rows_at_a_time;
      const int32_t row = row0 + i;
      const Element* a_elements = reinterpret_cast<const Element*>(&a[u]);
      const Element* b_elements = reinterpret_cast<const Element*>(&b[u]);
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        sum = fmaf(static_cast<float>(a_elements[e]), static_cast<float>(b_elements[e]), sum);
      }
      for (int distance = lanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      if (chunk != 0) continue;
      const float row_lse = row < band.q_len ? lse[row * params.lse.row] : minus_infinity();
      const bool dead = row_lse == minus_infinity();
      workspace.lse_log2[row_index + i] = dead ? -minus_infinity() : row_lse * kLog2E;
      workspace.delta[row_index + i] = dead ? 0.0f : dlse ? sum - dlse[row * params.dlse.row] : sum;
    }
  }
}

// Few rows a block where there would not be enough blocks otherwise.
template <typename Element>
Status launch_begin(const Backward& params, const BackwardWorkspace& workspace, int dquery_cols,
                    cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads * workspace.rows;
  if (rows < 512 * 128) {
    return launch_kernel("sm90::backward_begin_kernel", shape, backward_begin_kernel<Element, 32>,
                         rows / 32, kEdgeThreads, 0, stream, params, workspace, dquery_cols);
  }
  return launch_kernel("sm90::backward_begin_kernel", shape, backward_begin_kernel<Element, 128>,
                       rows / 128, kEdgeThreads, 0, stream, params, workspace, dquery_cols);
}

// Grid: batch x head x tiles of 64 query rows. A warp converts 16 rows by 32 columns at a time.
template <typename Config, typename Element>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_end_kernel(const __grid_constant__ Backward params,
                        const BackwardWorkspace workspace) {
  constexpr int kGroups = Config::kDqueryCols / 32;
  const Shape& shape = params.shape;
  const int32_t tiles = (shape.q_len + 63) / 64;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % tiles), row0 = tile * 64;
  const int64_t batch_head = blockIdx.x / tiles;
  const int32_t head = static_cast<int32_t>(batch_head % shape.heads);
  Element* dquery_gmem =
      BatchIndex(shape, batch_head / shape.heads).pointer<Element>(params.dquery, head);
  // A tile's 64 rows are together in the workspace, in column groups of kDqueryGroupCols.
  const float4* accumulators = reinterpret_cast<const float4*>(
      workspace.dquery + (batch_head * workspace.rows + row0) * Config::kDqueryCols);
  ptx::griddepcontrol_wait();
#pragma unroll
  for (int task = threadIdx.x / 32; task < 4 * kGroups; task += kEdgeThreads / 32) {
    const int warp = task % 4, col0 = task / 4 * 32;
    if (col0 >= shape.head_dim) continue;
    const int group = col0 / Config::kDqueryGroupCols, n0 = col0 % Config::kDqueryGroupCols / 8;
    const float4* source = accumulators + group * (Config::kStagingBytes / 16) + n0 * 128 +
                           warp * 32 + threadIdx.x % 32;
    float values[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float4 value = source[n * 128];
      values[n][0] = value.x;
      values[n][1] = value.y;
      values[n][2] = value.z;
      values[n][3] = value.w;
    }
    const int32_t row = row0 + warp * 16;
    store_rows(dquery_gmem + row * params.dquery.row + col0, params.dquery.row, shape.q_len - row,
               shape.head_dim - col0, params.options.scale, values);
  }
}

}  // namespace jax_flash::sm90
