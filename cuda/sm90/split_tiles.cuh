// Prepares operands for Hopper's kernels for float32 whose products are as exact as those of
// float32: splits them into two numbers of float16 (ptx/split.cuh), and writes tiles that one plain
// copy each brings to shared memory (plan/float32_tiles.h).
//
// A tile has the layout of a SmemTile of twice as many columns: all greater parts come first, then
// the rests. wgmma reads it in both orders, so nothing is transposed. In the backward pass above
// head dim 64, a tile has two parts, each with half of the columns. The numbers of a row, or of its
// part, are multiplied by the same power of two.
//
// The columns of a product's inner dimension may have any order, if both operands have the same;
// those of a result have that of its second operand. Here, of 16 columns, place 8 e + 2 t + s has
// column 4 t + 2 s + e: a thread that reads operands itself reads four contiguous columns, and its
// accumulators of a result are four contiguous columns (Float32Rows).
//
// Keys and queries that do not take part are treated as in sm90/float32_tiles.cuh. NaN and infinity
// become zeros in tiles of V in the forward pass, and in a second copy of K in the backward pass,
// which dQ reads (TilesOf::transposed).
//
// Each thread splits 16 columns of a row. Static shared memory holds two flags for each row, and
// the greatest number of each warp.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/float32_tiles.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/split.cuh"
#include "sm90/float32_tiles.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kSplitCols = 16;  // of a thread

// Reads this thread's columns, of which `cols` exist.
__device__ __forceinline__ void read_columns(float (&x)[kSplitCols], const float* from,
                                             int32_t cols, bool vectors) {
#pragma unroll
  for (int i = 0; i < kSplitCols; i += 4) {
    if (vectors) {
      if (i >= cols) continue;
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < cols) x[i + e] = __ldg(from + i + e);
      }
    }
  }
}

// Writes this thread's columns of a tile of kRows rows and kCols columns, times `factor`: those
// from `col` on.
template <int kRows, int kCols>
__device__ __forceinline__ void write_columns(float* tile, int row, int col,
                                              const float (&x)[kSplitCols], float factor) {
  constexpr int kPanelBytes = kRows * 128, kPanels = kCols / 64;
  uint32_t words[2][4][ptx::kSplitNumbers];  // of places 8 e + 2 t on
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      ptx::split(x[4 * t + e] * factor, x[4 * t + 2 + e] * factor, words[e][t]);
    }
  }
  uint8_t* const to = reinterpret_cast<uint8_t*>(tile) + col / 64 * kPanelBytes + row * 128;
#pragma unroll
  for (int number = 0; number < ptx::kSplitNumbers; ++number) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int chunk = col % 64 / 8 + e;
      *reinterpret_cast<uint4*>(to + number * kPanels * kPanelBytes + (chunk ^ row) % 8 * 16) =
          make_uint4(words[e][0][number], words[e][1][number], words[e][2][number],
                     words[e][3][number]);
    }
  }
}

// Returns the power of two for a row's numbers, of which this thread has `x`. kThreads neighbouring
// threads share the row.
template <int kThreads>
__device__ __forceinline__ float factor_of_row(const float (&x)[kSplitCols]) {
  float greatest = 0.0f;
#pragma unroll
  for (float value : x) {
    if (is_finite(value)) greatest = fmaxf(greatest, fabsf(value));
  }
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, distance));
  }
  return ptx::split_factor(greatest);
}

// Computes lse in the units of the logits and delta = sum(dO * O) - dlse of a row, where dO is not
// rounded. kThreads neighbouring threads share the row. `dout` points to its first column.
// `exists`: whether the row takes part.
template <int kThreads>
__device__ __forceinline__ void write_row_statistics(const GradientStatistics& of,
                                                     const BatchIndex& batch, int64_t batch_head,
                                                     int32_t head, int32_t row, int32_t cols,
                                                     bool exists, const float* dout) {
  float sum = 0.0f;
  const float* out = batch.pointer<const float>(of.out, head) + row * of.out.row;
  for (int32_t col = threadIdx.x % kThreads; exists && col < cols; col += kThreads) {
    sum = fmaf(__ldg(dout + col), __ldg(out + col), sum);
  }
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (threadIdx.x % kThreads == 0) of.store(batch, batch_head, head, row, exists, sum);
}

// The threads of a block, which writes a tile, or a part of one.
template <int kRows, int kCols>
inline constexpr int kSplitThreads = kRows * kCols / kSplitCols;

// Grid: as that of float32_tiles_kernel.
template <int kRows, int kCols, int kParts>
__global__ void __launch_bounds__(kSplitThreads<kRows, kCols>)
    split_tiles_kernel(const __grid_constant__ Forward params,
                       const __grid_constant__ AllTiles all) {
  constexpr int kThreads = kSplitThreads<kRows, kCols>, kRowThreads = kCols / kSplitCols;
  static_assert(kRows == kSplitRows && kThreads >= 128);
  ptx::griddepcontrol_launch_dependents();
  __shared__ bool exists[kRows], bad[kRows];
  if (all.counter && blockIdx.x == 0 && threadIdx.x == 0) *all.counter = 0;
  const TilePlace place(params.shape, all, kParts);
  const TilesOf& of = all.of[place.operand];
  const int32_t row0 = place.tile * kRows;
  const BatchIndex batch(params.shape, place.batch);
  if (threadIdx.x < 128) {
    const int row = threadIdx.x;
    const bool own = row < kRows && takes_part(params, of, all.has_key_mask, batch,
                                               Band(params, batch), place.head, row0 + row);
    if (row < kRows) {
      exists[row] = own;
      bad[row] = false;
    }
    if (of.bits && place.part == 0) write_bits<kRows>(of.bits + place.index, own);
  }
  __syncthreads();
  const int row = threadIdx.x / kRowThreads, col = threadIdx.x % kRowThreads * kSplitCols;
  const float* from = batch.pointer<const float>(of.from, place.head) + (row0 + row) * of.from.row;
  const int32_t first_col = place.part * kCols + col;
  float x[kSplitCols] = {};
  if (exists[row]) read_columns(x, from + first_col, of.cols - first_col, of.vectors);
  const float factor = factor_of_row<kRowThreads>(x);
  const auto write = [&](float* tiles) {
    constexpr int kFloats = kRows * kCols;
    float* const tile = tiles + (place.index * kParts + place.part) * (kFloats + kSplitRows);
    write_columns<kRows, kCols>(tile, row, col, x, factor);
    if (col == 0) tile[kFloats + row] = ptx::split_magnitude(factor);
  };
  if (of.plain) write(of.plain);
  if (of.transposed) {
#pragma unroll
    for (float& value : x) {
      if (is_finite(value)) continue;
      bad[row] = true;
      value = 0.0f;
    }
    write(of.transposed);
  }
  if (place.operand == all.dout && place.part == 0) {
    write_row_statistics<kRowThreads>(all.statistics, batch, place.batch_head, place.head,
                                      row0 + row, of.cols, exists[row], from);
  }
  if (!of.bad) return;
  __syncthreads();
  if (threadIdx.x < 128) {
    write_bits<kRows>(of.bad + place.index, threadIdx.x < kRows && bad[threadIdx.x]);
  }
}

// Launches the kernel that prepares operands, split or rounded. kParts: the number of parts of
// kCols columns that a tile has in the workspace.
template <bool kSplit, int kRows, int kCols, int kParts = 1>
Status launch_tiles(const Forward& params, const AllTiles& all, cudaStream_t stream) {
  if constexpr (kSplit) {
    return launch_kernel("sm90::split_tiles_kernel", params.shape,
                         split_tiles_kernel<kRows, kCols, kParts>, all.blocks(params.shape, kParts),
                         kSplitThreads<kRows, kCols>, 0, stream, params, all);
  } else {
    return launch_float32_tiles<kRows, kCols, kParts>(params, all, stream);
  }
}

}  // namespace jax_flash::sm90
