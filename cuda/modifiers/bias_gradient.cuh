// Computes the bias's gradient in the bias's own shape: dbias = sum of dS over the axes on which
// the bias is broadcast.
//
// A block owns a 64x64 tile of dbias (or a row, column or element, where the bias has no more) and
// visits every tile of logits that adds to it. It computes S and dP again, 64 columns of the
// operands at a time. That takes two more products than adding from the main kernel with atomics
// would, but it needs no memory of the bias's size, writes each element once, and gives the same
// bits on every run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "modifiers/score_gradient.cuh"
#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash {

inline constexpr int kBiasBlock = 64;
inline constexpr int kBiasThreads = 128;
using BiasOperandTile = SmemTile<kBiasBlock, 64>;

// Divides the index space of the logits, batch x N x row tiles x column tiles, into what a block
// owns and what it sums over. An axis is owned if dbias has a stride along it.
struct BiasOwnership {
  int64_t owned = 1, summed = 1;  // batches
  int32_t owned_heads, owned_row_tiles, owned_col_tiles;
  int32_t heads, row_tiles, col_tiles;

  BiasOwnership(const Shape& shape, const Operand& dbias) {
    for (int axis = 0; axis < shape.num_batch_dims; ++axis) {
      (dbias.batch[axis] ? owned : summed) *= shape.batch_dims[axis];
    }
    heads = shape.heads;
    row_tiles = static_cast<int32_t>(ceil_div(shape.q_len, kBiasBlock));
    col_tiles = static_cast<int32_t>(ceil_div(shape.kv_len, kBiasBlock));
    owned_heads = dbias.head ? heads : 1;
    owned_row_tiles = dbias.row ? row_tiles : 1;
    owned_col_tiles = dbias.col ? col_tiles : 1;
  }

  int64_t blocks() const { return owned * owned_heads * owned_row_tiles * owned_col_tiles; }

  // Returns the batch index for a pair of indices, one among the owned batches and one among the
  // summed batches.
  static __device__ __forceinline__ int64_t batch_index(const Shape& shape, const Operand& dbias,
                                                        int64_t own, int64_t sum) {
    int64_t index = 0, stride = 1;
#pragma unroll
    for (int axis = kMaxBatchDims - 1; axis >= 0; --axis) {
      if (axis >= shape.num_batch_dims) continue;
      int64_t& source = dbias.batch[axis] ? own : sum;
      index += source % shape.batch_dims[axis] * stride;
      source /= shape.batch_dims[axis];
      stride *= shape.batch_dims[axis];
    }
    return index;
  }
};

__device__ __forceinline__ void store_float(const Operand& operand, int64_t index, float value) {
  switch (operand.dtype) {
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(operand.data)[index] = __float2bfloat16_rn(value);
      return;
    case DType::kFloat16:
      static_cast<__half*>(operand.data)[index] = __float2half_rn(value);
      return;
    case DType::kFloat32: break;
  }
  static_cast<float*>(operand.data)[index] = value;
}

// Computes products += A B^T for 64 rows of A, 16 per warp, and 64 rows of B.
template <typename Element>
__device__ __forceinline__ void add_products(float (&products)[1][8][4], const Element* a_gmem,
                                             int64_t a_stride, int32_t row0, int32_t row_end,
                                             const Element* b_gmem, int64_t b_stride, int32_t col0,
                                             int32_t col_end, int32_t dim) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const BiasOperandTile a_smem{ptx::shared_address(smem), 0};
  const BiasOperandTile b_smem{a_smem.root, BiasOperandTile::kBytes};
  const BlockReader a_reader(a_smem, BlockOrder::kRowsFirst, threadIdx.x / 32 * 16, 0);
  const BlockReader b_reader(b_smem, BlockOrder::kColsFirst, 0, 0);
  for (int32_t k0 = 0; k0 < dim; k0 += 64) {
    __syncthreads();  // no thread still reads the previous tiles
    load_tile<kBiasThreads>(a_smem, a_gmem + k0, a_stride, row0, row0, row_end, dim - k0);
    load_tile<kBiasThreads>(b_smem, b_gmem + k0, b_stride, col0, col0, col_end, dim - k0);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    matmul<Element, 4>(
        products, [&](uint32_t (&a)[4], int, int k) { ptx::ldmatrix_x4(a, a_reader.at(0, k * 2)); },
        [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, b_reader.at(n * 8, k * 2)); });
  }
}

// Adds dS of one tile of one batch and head.
template <typename Element>
__device__ __forceinline__ void add_score_gradient(float (&total)[1][8][4], const Backward& params,
                                                   const BackwardWorkspace& workspace,
                                                   int64_t batch_index, int32_t head, int32_t row0,
                                                   int32_t col0) {
  const Shape& shape = params.shape;
  const BatchIndex batch(shape, batch_index);
  const Band band(params, batch);
  const TileRange range = kv_tiles<kBiasBlock>(band, row0, row0 + kBiasBlock);
  if (col0 / kBiasBlock < range.first || col0 / kBiasBlock >= range.end) return;
  const SegmentSpans& spans = workspace.spans;
  if (spans.query) {
    const SegmentSpan query_span = tile_span<kBiasBlock>(
        spans.query + batch_index * spans.query_blocks, spans.query_blocks, row0 / kBiasBlock);
    const SegmentSpan key_span = tile_span<kBiasBlock>(spans.key + batch_index * spans.key_blocks,
                                                       spans.key_blocks, col0 / kBiasBlock);
    if (!query_span.meets(key_span)) return;
  }
  const int32_t kv_head = head / (shape.heads / shape.kv_heads);
  const int32_t warp_row0 = row0 + threadIdx.x / 32 * 16;

  float scores[1][8][4];
  set_zero(scores);
  add_products(scores, batch.pointer<const Element>(params.query, head), params.query.row, row0,
               band.q_len, batch.pointer<const Element>(params.key, kv_head), params.key.row, col0,
               band.kv_len, shape.head_dim);
  float lse_log2[1][2], delta[1][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t index = workspace.row_index(batch_index * shape.heads + head,
                                              warp_row0 + fragment_row(0, 2 * half));
    lse_log2[0][half] = workspace.lse_log2[index];
    delta[0][half] = workspace.delta[index];
  }
  const ScoreGradient<true, 1, 8> gradient(params, batch, head, warp_row0, col0);
  gradient.mask(scores, band);
  gradient.probabilities(scores[0], lse_log2[0], 1.0f, 0, 0, 8);

  float dscores[1][8][4];
  set_zero(dscores);
  add_products(dscores, batch.pointer<const Element>(params.dout, head), params.dout.row, row0,
               band.q_len, batch.pointer<const Element>(params.value, kv_head), params.value.row,
               col0, band.kv_len, shape.value_dim);
  gradient.finish(scores, dscores, lse_log2, delta);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) total[0][n][e] += dscores[0][n][e];
  }
}

// Sums over the rows of a tile in a fixed order. All rows then hold the sum.
__device__ __forceinline__ void sum_rows(float (&total)[1][8][4]) {
  __shared__ float partial_smem[kBiasThreads / 32][kBiasBlock];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = total[0][n][e] + total[0][n][e + 2];
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      if (threadIdx.x % 32 < 4) partial_smem[threadIdx.x / 32][fragment_col(n, e)] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = 0.0f;
      for (int warp = 0; warp < kBiasThreads / 32; ++warp) {
        sum += partial_smem[warp][fragment_col(n, e)];
      }
      total[0][n][e] = sum;
    }
  }
}

// Sums over the columns of a tile. All columns then hold the sum.
__device__ __forceinline__ void sum_cols(float (&total)[1][8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) sum += total[0][n][2 * half] + total[0][n][2 * half + 1];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
#pragma unroll
    for (int n = 0; n < 8; ++n) total[0][n][2 * half] = total[0][n][2 * half + 1] = sum;
  }
}

template <typename Element>
__global__ void __launch_bounds__(kBiasThreads, 2)
    bias_gradient_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                         const BiasOwnership ownership) {
  const Shape& shape = params.shape;
  const Operand& dbias = params.dbias;
  int64_t block = blockIdx.x;
  const int32_t own_col = static_cast<int32_t>(block % ownership.owned_col_tiles);
  block /= ownership.owned_col_tiles;
  const int32_t own_row = static_cast<int32_t>(block % ownership.owned_row_tiles);
  block /= ownership.owned_row_tiles;
  const int32_t own_head = static_cast<int32_t>(block % ownership.owned_heads);
  const int64_t own_batch = block / ownership.owned_heads;

  float total[1][8][4];
  set_zero(total);
  for (int64_t sum_batch = 0; sum_batch < ownership.summed; ++sum_batch) {
    const int64_t batch = BiasOwnership::batch_index(shape, dbias, own_batch, sum_batch);
    for (int32_t head = own_head; head < ownership.heads; head += ownership.owned_heads) {
      for (int32_t row = own_row; row < ownership.row_tiles; row += ownership.owned_row_tiles) {
        for (int32_t col = own_col; col < ownership.col_tiles; col += ownership.owned_col_tiles) {
          add_score_gradient<Element>(total, params, workspace, batch, head, row * kBiasBlock,
                                      col * kBiasBlock);
        }
      }
    }
  }

  if (dbias.row == 0) sum_rows(total);
  if (dbias.col == 0) sum_cols(total);
  const BatchIndex batch(shape, BiasOwnership::batch_index(shape, dbias, own_batch, 0));
  const int64_t base = batch.offset(dbias) + own_head * dbias.head;
  const int32_t row_end = dbias.row ? shape.q_len : 1, col_end = dbias.col ? shape.kv_len : 1;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t row = own_row * kBiasBlock + threadIdx.x / 32 * 16 + fragment_row(0, e);
      const int32_t col = own_col * kBiasBlock + fragment_col(n, e);
      if (row < row_end && col < col_end) {
        store_float(dbias, base + row * dbias.row + col * dbias.col, total[0][n][e]);
      }
    }
  }
}

}  // namespace jax_flash
