// Computes the gradient of a bias in the bias's own shape:
//
//   dbias = sum of dS over the axes on which the bias is broadcast
//
// A thread block owns a 64x64 tile of dbias (or a row, column or element, if the bias has only one
// along an axis) and visits every tile of logits that adds to it. It computes S and dP again, 64
// columns of the operands at a time (gradient_tile.cuh). This takes two more products than atomic
// additions from the main kernel would. But it needs no memory of the bias's size, writes each
// element once, and gives the same bits in every run.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "modifiers/gradient_tile.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Divides the index space of the logits, batch x N x row tiles x column tiles, into the part that a
// thread block owns and the part that it sums over. An axis is owned if dbias has a stride along
// it.
struct BiasOwnership {
  int64_t owned = 1, summed = 1;  // batches
  int32_t owned_heads, owned_row_tiles, owned_col_tiles;
  int32_t heads, row_tiles, col_tiles;

  // `block`: rows and columns of a tile.
  BiasOwnership(const Shape& shape, const Operand& dbias, int32_t block = kGradientBlock) {
    for (int axis = 0; axis < shape.num_batch_dims; ++axis) {
      (dbias.batch[axis] ? owned : summed) *= shape.batch_dims[axis];
    }
    heads = shape.heads;
    row_tiles = static_cast<int32_t>(ceil_div(shape.q_len, block));
    col_tiles = static_cast<int32_t>(ceil_div(shape.kv_len, block));
    owned_heads = dbias.head ? heads : 1;
    owned_row_tiles = dbias.row ? row_tiles : 1;
    owned_col_tiles = dbias.col ? col_tiles : 1;
  }

  __host__ __device__ __forceinline__ int64_t blocks() const {
    return owned * owned_heads * owned_row_tiles * owned_col_tiles;
  }

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

// Sums over the rows of a tile in a fixed order. All rows then hold the sum.
__device__ __forceinline__ void sum_rows(float (&total)[1][8][4]) {
  __shared__ float partial_smem[kGradientThreads / 32][kGradientBlock];
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
      for (int warp = 0; warp < kGradientThreads / 32; ++warp) {
        sum += partial_smem[warp][fragment_col(n, e)];
      }
      total[0][n][e] = sum;
    }
  }
}

// Sums over the columns of a tile. All columns then hold the sum.
template <int kN>
__device__ __forceinline__ void sum_cols(float (&total)[1][kN][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n) sum += total[0][n][2 * half] + total[0][n][2 * half + 1];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
#pragma unroll
    for (int n = 0; n < kN; ++n) total[0][n][2 * half] = total[0][n][2 * half + 1] = sum;
  }
}

template <typename Element>
__global__ void __launch_bounds__(kGradientThreads, 2)
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
          add_score_gradient<Element>(total, params, workspace, batch, head, row * kGradientBlock,
                                      col * kGradientBlock);
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
      const int32_t row = own_row * kGradientBlock + threadIdx.x / 32 * 16 + fragment_row(0, e);
      const int32_t col = own_col * kGradientBlock + fragment_col(n, e);
      if (row < row_end && col < col_end) {
        store_float(dbias, base + row * dbias.row + col * dbias.col, total[0][n][e]);
      }
    }
  }
}

}  // namespace jax_flash
