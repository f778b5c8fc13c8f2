// Defines the kernels that run before and after the main backward kernels. Memory bandwidth bounds
// both.
//   begin: delta = sum_h(dout * out) - dlse, perhaps times the scale (GradientScales); lse in log2
//          units; zeros in the sums that the main kernel adds to
//   end:   dquery from its float32 sums, which are in fragment order, to its own type and layout
// The rest kernel replaces the end kernel where the main kernel has converted some tiles.
#pragma once

#include <cstdint>

#include "modifiers/logits.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/plan.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/chunk.cuh"
#include "tile/quad.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kEdgeThreads = 256;

// Zeroes the sums that the main kernels add to, for kEdgeRows rows, and some of the counters. The
// first block also writes the lse and delta of rows beyond the last. Called by all threads.
__device__ __forceinline__ void write_zeros(const BackwardEdgePlan& plan, int32_t batch_head,
                                            int32_t row0) {
  const BackwardWorkspace& workspace = plan.workspace;
  const int thread = threadIdx.x;
  for (int64_t i = int64_t{blockIdx.x} * kEdgeThreads + thread; i < plan.counters;
       i += int64_t{gridDim.x} * kEdgeThreads) {
    workspace.counters[i] = 0;
  }
  if (blockIdx.x == 0 && thread < kMaxBlockQ) {
    workspace.lse_log2[workspace.padding + thread] = -minus_infinity();
    workspace.delta[workspace.padding + thread] = 0.0f;
  }
  if (workspace.turns) {             // no zeros: the first block to add stores
    static_assert(kEdgeRows == 32);  // so that two flags a tile are enough
    const int flag = row0 / kEdgeRows * 2 + thread;
    if (thread < 2 && flag < workspace.flags) {
      workspace.turns[int64_t{batch_head} * workspace.flags + flag] = 0;
    }
    return;
  }
  if (batch_head >= plan.zeroed_heads) return;
  float4* sums = reinterpret_cast<float4*>(
      workspace.dquery + (int64_t{batch_head} * workspace.dquery_rows + row0) * plan.head_dim);
  const int zeros = min(workspace.dquery_rows - row0, kEdgeRows) * plan.head_dim;
  for (int i = thread; i < zeros / 4; i += kEdgeThreads) {
    sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

// Computes delta, and lse in log2 units. The grid is batch x head x tiles of kEdgeRows rows. kLanes
// lanes read a row; if kLanes is 64, 32 lanes read two chunks each. The zeros depend on no read, so
// they are written while all reads are in flight.
template <typename Element, int kLanes>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_begin_kernel(const __grid_constant__ BackwardEdgePlan plan,
                          const __grid_constant__ Backward params) {
  constexpr int kRowLanes = kLanes < 32 ? kLanes : 32, kRowsAtATime = kEdgeThreads / kRowLanes;
  constexpr int kBatch = (kEdgeRows + kRowsAtATime - 1) / kRowsAtATime;
  ptx::griddepcontrol_launch_dependents();
  touch_parameters(plan);
  const BackwardWorkspace& workspace = plan.workspace;
  const int32_t batch_head = plan.tiles.quotient(static_cast<int32_t>(blockIdx.x));
  const int32_t row0 =
      (static_cast<int32_t>(blockIdx.x) - batch_head * plan.tiles.divisor) * kEdgeRows;
  const HeadIndex head = plan.heads.at(batch_head);
  const int32_t q_len =
      plan.q_len_varies ? Band(params, BatchIndex(params.shape, head.batch)).q_len : plan.q_len;
  const int thread = threadIdx.x, chunk = thread % kRowLanes, first = thread / kRowLanes;
  const int32_t rows_left = chunk * kChunk < plan.value_dim ? min(q_len - row0, kEdgeRows) : 0;
  const Element* out = plan.out.at<const Element>(head, row0) + chunk * kChunk;
  const Element* dout = plan.dout.at<const Element>(head, row0) + chunk * kChunk;
  uint4 a[kBatch] = {}, b[kBatch] = {};
#pragma unroll
  for (int u = 0; u < kBatch; ++u) {
    const int i = first + u * kRowsAtATime;
    if (i >= rows_left) continue;
    a[u] = *reinterpret_cast<const uint4*>(out + i * plan.out.row);
    b[u] = *reinterpret_cast<const uint4*>(dout + i * plan.dout.row);
  }
  // One thread handles lse and delta of a row.
  const bool has_row = thread < kEdgeRows && row0 + thread < q_len;
  float row_lse = minus_infinity(), row_dlse = 0.0f;
  if (has_row) {
    row_lse = plan.lse.at<const float>(head, row0)[thread * plan.lse.row];
    if (plan.dlse.data) row_dlse = plan.dlse.at<const float>(head, row0)[thread * plan.dlse.row];
  }
  write_zeros(plan, batch_head, row0);
  __shared__ float sums_smem[kBatch * kRowsAtATime];
#pragma unroll
  for (int u = 0; u < kBatch; ++u) {
    float sum = dot_product_of_chunk<Element>(a[u], b[u]);
    if constexpr (kLanes > kRowLanes) {
      const int i = first + u * kRowsAtATime;
      if (i < rows_left && (chunk + kRowLanes) * kChunk < plan.value_dim) {
        sum += dot_product_of_chunk(out + i * plan.out.row + kRowLanes * kChunk,
                                    dout + i * plan.dout.row + kRowLanes * kChunk);
      }
    }
#pragma unroll
    for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (chunk == 0) sums_smem[first + u * kRowsAtATime] = sum;
  }
  __syncthreads();
  if (thread >= min(workspace.rows - row0, kEdgeRows)) return;
  const int64_t row_index = int64_t{batch_head} * workspace.rows + row0;
  const bool dead = row_lse == minus_infinity();
  // The units of the shift are those of the logits.
  float shift = row_lse * (in_natural_units(params) ? 1.0f : kLog2E);
  if (plan.scales.shifts_lse && !dead) {
    const BatchIndex batch = head.batch_index();
    const int32_t row = row0 + thread;
    const float low =
        batch.pointer<const float>(params.lse_low, head.head)[row * params.lse_low.row];
    shift = shifted_lse(params, DistanceBias(params, batch, head.head), row, row_lse, low);
  }
  workspace.lse_log2[row_index + thread] = dead ? -minus_infinity() : shift;
  workspace.delta[row_index + thread] =
      dead ? 0.0f : (sums_smem[thread] - row_dlse) * plan.scales.delta;
}

inline constexpr int kEndThreads = 128, kEndCols = 64;

// Converts kEndCols columns of a tile of 64 query rows. A warp converts 16 rows.
template <typename Layout, typename Element>
__device__ __forceinline__ void convert_tile(const BackwardEdgePlan& plan, int32_t index,
                                             int group) {
  static_assert(Layout::kCols % kEndCols == 0);
  const BackwardWorkspace& workspace = plan.workspace;
  const int32_t batch_head = plan.tiles.quotient(index);
  const int32_t tile = index - batch_head * plan.tiles.divisor;
  const int row0 = tile * 64 + threadIdx.x / 32 * 16, col0 = group * kEndCols;
  Element* dquery_gmem = plan.dquery.at<Element>(plan.heads.at(batch_head), row0) + col0;
  const int lanes = dquery_lanes(plan.q_len, tile * 64), thread = threadIdx.x;
  const int64_t place = (int64_t{batch_head} * workspace.dquery_rows + tile * 64) * plan.head_dim +
                        (group * (kEndCols / 8) * lanes + thread) * 4;
  const int col_blocks = thread < lanes ? (plan.head_dim - col0) / 8 : 0;
  const int32_t* turns =
      workspace.turns + int64_t{batch_head} * workspace.flags + tile * Layout::kTileFlags + group;
  float values[kEndCols / 8][4] = {};
  const auto each = [&](const float* sums, const auto& use) {
#pragma unroll
    for (int n = 0; n < kEndCols / 8; ++n) {
      if (n < col_blocks) {
        use(values[n], *reinterpret_cast<const float4*>(sums + place + n * lanes * 4));
      }
    }
  };
  ptx::griddepcontrol_wait();
  // In ordered runs, the first block to add stores instead, so a sum is undefined if no block has
  // added to it.
  if (workspace.turns == nullptr || *turns != 0) {
    each(workspace.dquery, [](float (&to)[4], const float4& value) {
      to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
    });
  }
  if (Layout::kOrderedSums > 1 && workspace.odd_dquery != nullptr &&
      turns[workspace.flags / 2] != 0) {
    each(workspace.odd_dquery, [](float (&to)[4], const float4& value) {
      to[0] += value.x, to[1] += value.y, to[2] += value.z, to[3] += value.w;
    });
  }
  store_rows(dquery_gmem, plan.dquery.row, plan.q_len - row0, plan.head_dim - col0,
             plan.scales.dquery, values);
}

// Converts all tiles. The grid is column groups x tiles of 64 query rows x heads x batch.
template <typename Layout, typename Element>
__global__ void __launch_bounds__(kEndThreads, 1024 / kEndThreads)
    backward_end_kernel(const __grid_constant__ BackwardEdgePlan plan) {
  constexpr int kGroups = Layout::kCols / kEndCols;
  touch_parameters(plan);
  const auto block = static_cast<int32_t>(blockIdx.x);
  convert_tile<Layout, Element>(plan, block / kGroups, block % kGroups);
}

inline constexpr int kRestBlocks = 4;  // for each block of the main kernel

// Converts the tiles that the main kernel did not convert: see EndPlan. The grid is column groups x
// blocks of the main kernel x kRestBlocks.
template <typename Layout, typename Element>
__global__ void __launch_bounds__(kEndThreads, 1024 / kEndThreads)
    backward_rest_kernel(const __grid_constant__ BackwardEdgePlan plan,
                         const __grid_constant__ EndPlan ends) {
  constexpr int kGroups = Layout::kCols / kEndCols;
  touch_parameters(plan);
  const int32_t part = static_cast<int32_t>(blockIdx.x) / kGroups;
  const int32_t block = part % ends.blocks;
  ptx::griddepcontrol_wait();
  const BackwardCounters counters{plan.workspace.counters, ends.units};
  const int32_t round = *counters.converted(block) + part / ends.blocks;
  for (int32_t index = round * ends.blocks + block; index < ends.tiles;
       index += kRestBlocks * ends.blocks) {
    convert_tile<Layout, Element>(plan, index, static_cast<int32_t>(blockIdx.x) % kGroups);
  }
}

}  // namespace jax_flash::sm90
