// What goes before and after the main backward kernel, both bound by memory bandwidth:
//   before: delta = sum_h(dout * out) - dlse, lse in log2 units, accumulators set to zero
//   after:  dquery from float32 accumulators, in fragment order, to its own type and layout
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/math.cuh"
#include "sm80/workspace.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/logits.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// The order of a [kBlockQ, kHeadDim] tile of float32 accumulators in the workspace. A warp's
// elements are together, and 32 lanes add to one or four contiguous lines at a time.
template <typename Config>
struct DqueryOrder {
  static constexpr int kWarpCols = Config::kWarps / Config::kQueryWarpRows;
  static constexpr int kM = Config::kBlockQ / 16 / Config::kQueryWarpRows;
  static constexpr int kN = Config::kHeadDim / 8 / kWarpCols;
  static_assert(kM * kN * kWarpCols * Config::kQueryWarpRows * 128 ==
                Config::kBlockQ * Config::kHeadDim);

  // Where element 0 of block (m, n) of lane `lane` of warp `warp` is, and how far apart the four
  // elements are: neighbours where one instruction adds all four.
  static __device__ __forceinline__ int offset(int warp, int m, int n, int lane) {
    return ((warp * kM + m) * kN + n) * 128 + lane * kLaneStride;
  }
#if __CUDA_ARCH__ >= 900
  static constexpr int kLaneStride = 4, kElementStride = 1;
#else
  static constexpr int kLaneStride = 1, kElementStride = 32;
#endif
};

inline constexpr int kEdgeThreads = 256;

template <typename Element>
__device__ __forceinline__ float to_float(Element value) {
  return static_cast<float>(value);
}

// Grid: batch x head x tiles of kRowPadding rows. `dquery_cols` accumulators a row.
template <typename Element>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_begin_kernel(const __grid_constant__ Backward params,
                          const BackwardWorkspace workspace, int32_t dquery_cols) {
  const Shape& shape = params.shape;
  const int32_t tiles = workspace.rows / kRowPadding;
  const int32_t row0 = static_cast<int32_t>(blockIdx.x % tiles) * kRowPadding;
  const int64_t batch_head = blockIdx.x / tiles;
  const int32_t head = static_cast<int32_t>(batch_head % shape.heads);
  const BatchIndex batch(shape, batch_head / shape.heads);
  const Band band(params, batch);

  float4* dquery = reinterpret_cast<float4*>(workspace.dquery +
                                             (batch_head * workspace.rows + row0) * dquery_cols);
  for (int i = threadIdx.x; i < kRowPadding * dquery_cols / 4; i += kEdgeThreads) {
    dquery[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (workspace.turns) {
    if (threadIdx.x < kRowPadding / 32) {
      workspace.turns[(batch_head * workspace.rows + row0) / 32 + threadIdx.x] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.ticket = 0;
  }

  // 8, 16 or 32 lanes read a row of up to 64, 128 or 256 elements.
  const int lanes = shape.value_dim <= 64 ? 8 : shape.value_dim <= 128 ? 16 : 32;
  const int chunk = threadIdx.x % lanes;
  const bool chunk_valid = chunk * kChunk < shape.value_dim;
  const Element* out = batch.pointer<const Element>(params.out, head);
  const Element* dout = batch.pointer<const Element>(params.dout, head);
  const float* lse = batch.pointer<const float>(params.lse, head);
  const float* dlse = params.dlse ? batch.pointer<const float>(params.dlse, head) : nullptr;
  for (int i = threadIdx.x / lanes; i < kRowPadding; i += kEdgeThreads / lanes) {
    const int32_t row = row0 + i;
    float sum = 0.0f;
    if (row < band.q_len && chunk_valid) {
      const uint4 a = *reinterpret_cast<const uint4*>(out + row * params.out.row + chunk * kChunk);
      const uint4 b =
          *reinterpret_cast<const uint4*>(dout + row * params.dout.row + chunk * kChunk);
      const Element* a_elements = reinterpret_cast<const Element*>(&a);
      const Element* b_elements = reinterpret_cast<const Element*>(&b);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        sum = fmaf(to_float(a_elements[e]), to_float(b_elements[e]), sum);
      }
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (chunk != 0) continue;
    const float row_lse = row < band.q_len ? lse[row * params.lse.row] : minus_infinity();
    const bool dead = row_lse == minus_infinity();
    const int64_t index = batch_head * workspace.rows + row;
    // Its units are those of logits.
    workspace.lse_log2[index] =
        dead ? -minus_infinity() : row_lse * (in_natural_units(params) ? 1.0f : kLog2E);
    workspace.delta[index] = dead ? 0.0f : dlse ? sum - dlse[row * params.dlse.row] : sum;
  }
}

// Grid: batch x head x query tiles.
template <typename Config, typename Element>
__global__ void __launch_bounds__(kEdgeThreads)
    backward_end_kernel(const __grid_constant__ Backward params,
                        const BackwardWorkspace workspace) {
  using Order = DqueryOrder<Config>;
  constexpr int kChunks = Config::kHeadDim / kChunk;
  const Shape& shape = params.shape;
  const int32_t tiles = (shape.q_len + Config::kBlockQ - 1) / Config::kBlockQ;
  const int32_t row0 = static_cast<int32_t>(blockIdx.x % tiles) * Config::kBlockQ;
  const int64_t batch_head = blockIdx.x / tiles;
  const int32_t head = static_cast<int32_t>(batch_head % shape.heads);
  Element* dquery_gmem =
      BatchIndex(shape, batch_head / shape.heads).pointer<Element>(params.dquery, head);
  const float* accumulators =
      workspace.dquery + (batch_head * workspace.rows + row0) * Config::kHeadDim;
  const float scale = params.options.scale;
  for (int i = threadIdx.x; i < Config::kBlockQ * kChunks; i += kEdgeThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (row0 + row >= shape.q_len || chunk * kChunk >= shape.head_dim) continue;
    // Warps take turns at 16 columns: see the main kernel's product dQ.
    const int warp_row = row / (16 * Order::kM), m = row / 16 % Order::kM;
    const int warp_col = chunk / 2 % Order::kWarpCols,
              n = chunk / 2 / Order::kWarpCols * 2 + chunk % 2;
    const int warp = warp_row * Order::kWarpCols + warp_col;
    const int half = row / 8 % 2;
    uint32_t pairs[4];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float* pair = accumulators + Order::offset(warp, m, n, row % 8 * 4 + t) +
                          2 * half * Order::kElementStride;
      pairs[t] = ptx::cvt_rn_x2<Element>(pair[0] * scale, pair[Order::kElementStride] * scale);
    }
    *reinterpret_cast<uint4*>(dquery_gmem + (row0 + row) * params.dquery.row + chunk * kChunk) =
        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

}  // namespace jax_flash::sm80
