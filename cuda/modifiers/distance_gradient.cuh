// Computes the gradients of ALiBi slopes and of a relative bias. Both are sums of dS by distance:
//
//   dslope = sum of dS * d over all pairs
//   dr[i]  = sum of dS over the pairs whose distance selects number i of the relative bias
//
// Elements of equal distance are on one diagonal of the logits. Element [a, b] of every tile on one
// diagonal of tiles has the same distance. Therefore a block of the first kernel owns a diagonal of
// tiles of one batch and head, adds up dS of its tiles in registers, and then sums each of the 127
// diagonals of the result. The second kernel adds the sums that belong to a slope, or to a number
// of the relative bias. Neither uses atomics, so every run gives the same bits. They need 8 (T + S)
// bytes of device memory per batch and head.
#pragma once

#include <cstdint>

#include "modifiers/distance.cuh"
#include "modifiers/gradient_tile.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

static_assert(kDistanceBlock == kGradientBlock);

// Adds element [a, b] of the block's tile to sums[b - a + 63], in a fixed order.
__device__ __forceinline__ void sum_diagonals(const float (&total)[1][8][4],
                                              float (&sums)[kDistanceSums]) {
  // Rows are padded, so that neighbours along a diagonal differ in banks.
  __shared__ float tile_smem[kGradientBlock][kGradientBlock + 2];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      tile_smem[threadIdx.x / 32 * 16 + fragment_row(0, e)][fragment_col(n, e)] = total[0][n][e];
    }
  }
  __syncthreads();
  const int shift = static_cast<int>(threadIdx.x) - (kGradientBlock - 1);
  float sum = 0.0f;
  for (int row = max(0, -shift); row < kGradientBlock && row + shift < kGradientBlock; ++row) {
    sum += tile_smem[row][row + shift];
  }
  sums[threadIdx.x] = sum;
}

// The grid has a block for each diagonal of tiles of each batch and head. Diagonal 0 has the tile
// of the last rows and the first columns.
template <typename Element>
__global__ void __launch_bounds__(kGradientThreads, 2)
    distance_gradient_kernel(const __grid_constant__ Backward params,
                             const BackwardWorkspace workspace) {
  static_assert(kGradientThreads == kDistanceSums);
  const Shape& shape = params.shape;
  const int32_t row_tiles = (shape.q_len - 1) / kGradientBlock + 1;
  const int32_t col_tiles = (shape.kv_len - 1) / kGradientBlock + 1;
  const int32_t diagonals = row_tiles + col_tiles - 1;
  const int32_t shift = static_cast<int32_t>(blockIdx.x % diagonals) - (row_tiles - 1);
  const int64_t batch_head = blockIdx.x / diagonals;
  const int64_t batch = batch_head / shape.heads;
  const int32_t head = static_cast<int32_t>(batch_head % shape.heads);
  float total[1][8][4];
  set_zero(total);
  for (int32_t row = max(0, -shift); row < row_tiles && row + shift < col_tiles; ++row) {
    add_score_gradient<Element>(total, params, workspace, batch, head, row * kGradientBlock,
                                (row + shift) * kGradientBlock);
  }
  float* const sums = workspace.diagonals + int64_t{blockIdx.x} * kDistanceSums;
  sum_diagonals(total, reinterpret_cast<float (&)[kDistanceSums]>(*sums));
}

// Sums `value` over the threads of a block, in a fixed order.
__device__ __forceinline__ double sum_of_block(double value) {
  __shared__ double warps_smem[kGradientThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  __syncthreads();  // the previous sum has been read
  if (threadIdx.x % 32 == 0) warps_smem[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (double part : warps_smem) sum += part;
  return sum;
}

// The grid has a block for each batch and head.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    distance_sums_kernel(const __grid_constant__ Backward params,
                         const BackwardWorkspace workspace) {
  const Shape& shape = params.shape;
  const BatchIndex batch(shape, blockIdx.x / shape.heads);
  const int32_t head = static_cast<int32_t>(blockIdx.x % shape.heads);
  const DistanceBias distances(params, batch, head);
  const int32_t row_tiles = (shape.q_len - 1) / kGradientBlock + 1;
  const int32_t diagonals = row_tiles + (shape.kv_len - 1) / kGradientBlock;
  const float* const sums = workspace.diagonals + int64_t{blockIdx.x} * diagonals * kDistanceSums;
  // The shift (key minus query index) of sum [0, 0].
  const int64_t first = -int64_t{row_tiles} * kGradientBlock + 1;
  const auto sum_at = [&](int64_t shift) {  // sum of one shift, from at most two diagonals
    const int64_t index = shift - first, diagonal = index / kGradientBlock;
    float sum = 0.0f;
    for (int64_t i = max(diagonal - 1, int64_t{0}); i <= diagonal && i < diagonals; ++i) {
      sum += sums[i * kDistanceSums + index - i * kGradientBlock];
    }
    return sum;
  };
  const int64_t count = int64_t{diagonals + 1} * kGradientBlock - 1;  // of shifts
  double slope = 0.0, below = 0.0, above = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int32_t shift = static_cast<int32_t>(first + i);
    const int32_t distance = sub_sat(shift, distances.query_offset);
    const double sum = sum_at(shift);
    slope += sum * distance;
    if (distances.count == 0) continue;
    const int32_t index = distances.index(distance);
    if (index == 0) {
      below += sum;
    } else if (index == distances.count - 1) {
      above += sum;
    }
  }
  slope = sum_of_block(slope);
  if (threadIdx.x == 0 && params.dalibi_slopes) {
    *batch.pointer<float>(params.dalibi_slopes, head) = static_cast<float>(slope);
  }
  if (!params.drelative_bias) return;
  below = sum_of_block(below);
  above = sum_of_block(above);
  float* const gradient = batch.pointer<float>(params.drelative_bias, head);
  const int32_t last = distances.count - 1;
  if (threadIdx.x == 0) {
    gradient[0] = static_cast<float>(below);
    if (last > 0) gradient[last] = static_cast<float>(above);
  }
  for (int32_t i = 1 + threadIdx.x; i < last; i += kThreads) {
    const int64_t shift = int64_t{i} - distances.count / 2 + distances.query_offset;
    gradient[i] = shift >= first && shift < first + count ? sum_at(shift) : 0.0f;
  }
}

}  // namespace jax_flash
