// What goes before and after the main backward kernels, both bound by memory bandwidth:
//   before: delta = sum_h(dout * out) - dlse, lse in log2 units, accumulators set to zero
//   after:  dquery from float32 accumulators, in fragment order, to its own type and layout
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"
#include "sm80/workspace.h"
#include "sm90/backward_plan.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/quad.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kEdgeThreads = 256;
inline constexpr int kEdgeRows = 32;                 // for which there is a turn
inline constexpr int kSpreadSmemBytes = 100 * 1024;  // with which a multiprocessor has two blocks

// What main kernels add to, for kRows rows, by all threads.
template <int kRows>
__device__ __forceinline__ void write_zeros(const BackwardEdgePlan& plan, int64_t row_index) {
  int32_t* const turns = plan.workspace.turns;
  if (blockIdx.x == 0 && threadIdx.x == 0 && plan.dquery_cols > 0) {
    *static_cast<int32_t*>(plan.dquery.data) = 0;  // see choose_blocks()
  }
  if (turns) {  // the first to come stores
    if (threadIdx.x < kRows / kEdgeRows) turns[row_index / kEdgeRows + threadIdx.x] = 0;
    return;
  }
  float4* sums = reinterpret_cast<float4*>(plan.workspace.dquery + row_index * plan.dquery_cols);
  for (int i = threadIdx.x; i < kRows * plan.dquery_cols / 4; i += kEdgeThreads) {
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// Grid: batch x head x tiles of kRows rows. What is written first needs nothing that is read, and
// the rows of several iterations are under way at a time.
template <typename Element, int kRows>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_begin_kernel(const __grid_constant__ BackwardEdgePlan plan,
                          const __grid_constant__ Backward params) {
  static_assert(kRows % kEdgeRows == 0 && sm80::kRowPadding % kRows == 0);
  ptx::griddepcontrol_launch_dependents();
  touch_parameters(plan);
  const BackwardWorkspace& workspace = plan.workspace;
  const int32_t batch_head = plan.tiles.quotient(static_cast<int32_t>(blockIdx.x));
  const int32_t row0 = (static_cast<int32_t>(blockIdx.x) - batch_head * plan.tiles.divisor) * kRows;
  const HeadIndex head = plan.heads.at(batch_head);
  const int32_t q_len =
      plan.band_varies ? Band(params, BatchIndex(params.shape, head.batch)).q_len : plan.q_len;
  const int64_t row_index = int64_t{batch_head} * workspace.rows + row0;
  write_zeros<kRows>(plan, row_index);
  // 8, 16 or 32 lanes read a row of up to 64, 128 or 256 elements.
  const int lanes = plan.value_dim <= 64 ? 8 : plan.value_dim <= 128 ? 16 : 32;
  const int chunk = threadIdx.x % lanes;
  const bool chunk_valid = chunk * kChunk < plan.value_dim;
  const Element* out = plan.out.at<const Element>(head, row0) + chunk * kChunk;
  const Element* dout = plan.dout.at<const Element>(head, row0) + chunk * kChunk;
  const float* lse = plan.lse.at<const float>(head, row0);
  const float* dlse = plan.dlse.at<const float>(head, row0);
  const int rows_at_a_time = kEdgeThreads / lanes;
  constexpr int kBatch = kRows / kEdgeRows;
  for (int i0 = threadIdx.x / lanes; i0 < kRows; i0 += kBatch * rows_at_a_time) {
    uint4 a[kBatch] = {}, b[kBatch] = {};
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int i = i0 + u * rows_at_a_time;
      if (row0 + i >= q_len || !chunk_valid) continue;
      a[u] = *reinterpret_cast<const uint4*>(out + i * plan.out.row);
      b[u] = *reinterpret_cast<const uint4*>(dout + i * plan.dout.row);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
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
      const int i = i0 + u * rows_at_a_time;
      const float row_lse = row0 + i < q_len ? lse[i * plan.lse.row] : minus_infinity();
      const bool dead = row_lse == minus_infinity();
      if (plan.dlse.data && !dead) sum -= dlse[i * plan.dlse.row];
      workspace.lse_log2[row_index + i] = dead ? -minus_infinity() : row_lse * kLog2E;
      workspace.delta[row_index + i] = dead ? 0.0f : sum;
    }
  }
}

// Few rows a block where there would not be enough blocks otherwise.
template <typename Element>
Status launch_begin(const Backward& params, const BackwardWorkspace& workspace, int dquery_cols,
                    cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t rows = shape.batch * shape.heads * workspace.rows;
  const auto launch = [&](auto* kernel, int block_rows) {
    return launch_kernel(
        "sm90::backward_begin_kernel", shape, kernel, rows / block_rows, kEdgeThreads, 0, stream,
        BackwardEdgePlan(params, workspace, workspace.rows / block_rows, dquery_cols), params);
  };
  if (rows < 512 * 128) return launch(backward_begin_kernel<Element, 32>, 32);
  return launch(backward_begin_kernel<Element, 128>, 128);
}

// Grid: batch x head x tiles of 64 query rows. A warp converts 16 rows by 32 columns at a time.
template <typename Config, typename Element>
__global__ void __launch_bounds__(kEdgeThreads, 2048 / kEdgeThreads)
    backward_end_kernel(const __grid_constant__ BackwardEdgePlan plan) {
  constexpr int kGroups = Config::kDqueryCols / 32;
  touch_parameters(plan);
  const BackwardWorkspace& workspace = plan.workspace;
  const int32_t batch_head = plan.tiles.quotient(static_cast<int32_t>(blockIdx.x));
  const int32_t tile = static_cast<int32_t>(blockIdx.x) - batch_head * plan.tiles.divisor;
  const int32_t row0 = tile * 64;
  Element* dquery_gmem = plan.dquery.at<Element>(plan.heads.at(batch_head), row0);
  // A tile's 64 rows are together in the workspace, in column groups of kDqueryGroupCols.
  const int64_t row_index = int64_t{batch_head} * workspace.rows + row0;
  const auto of_rows = [&](const float* sums) {
    return reinterpret_cast<const float4*>(sums + row_index * Config::kDqueryCols);
  };
  const int32_t* turns = workspace.turns + (int64_t{batch_head} * workspace.rows / kEdgeRows) +
                         (Config::kDqueryByRows ? tile : tile * Config::kConsumers);
  ptx::griddepcontrol_wait();
#pragma unroll
  for (int task = threadIdx.x / 32; task < 4 * kGroups; task += kEdgeThreads / 32) {
    const int warp = task % 4, col0 = task / 4 * 32;
    if (col0 >= plan.head_dim) continue;
    const int group = col0 / Config::kDqueryGroupCols, n0 = col0 % Config::kDqueryGroupCols / 8;
    const int64_t place =
        group * (Config::kStagingBytes / 16) + n0 * 128 + warp * 32 + threadIdx.x % 32;
    float values[4][4] = {};
    const auto add = [&](const float* sums) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float4 value = of_rows(sums)[place + n * 128];
        values[n][0] += value.x;
        values[n][1] += value.y;
        values[n][2] += value.z;
        values[n][3] += value.w;
      }
    };
    // With turns the first to come stores its sums, and nobody need have come.
    if (workspace.turns == nullptr || turns[group] != 0) add(workspace.dquery);
    if (Config::kOrderedSums > 1 && workspace.turns != nullptr &&
        turns[group + ordered_flags<Config>(workspace)] != 0) {
      add(workspace.odd_dquery);
    }
    store_rows(dquery_gmem + warp * 16 * plan.dquery.row + col0, plan.dquery.row,
               plan.q_len - row0 - warp * 16, plan.head_dim - col0, plan.scale, values);
  }
}

}  // namespace jax_flash::sm90
