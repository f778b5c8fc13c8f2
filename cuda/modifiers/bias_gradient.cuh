// Computes the gradient of a bias in the bias's own shape:
//
//   dbias = sum of dS over the axes on which the bias is broadcast
//
// A thread block owns a 64x64 tile of dbias (or a row, column or element, if the bias has only one
// along an axis) and visits every tile of logits that adds to it. It computes S and dP again, 64
// columns of the operands at a time (gradient_tile.cuh). This takes two more products than atomic
// additions from the main kernel would. But it needs no memory of the bias's size, writes each
// element once, and gives the same bits in every run. If there are few such tiles, several blocks
// divide the visits of one (BiasParts).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
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
  // Returns the number of tiles of logits that add to a tile of dbias.
  __host__ __device__ __forceinline__ int64_t summed_tiles() const {
    return summed * (heads / owned_heads) * (row_tiles / owned_row_tiles) *
           (col_tiles / owned_col_tiles);
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

// Identifies a thread block's tile of dbias.
struct BiasTileIndex {
  int32_t col, row, head;
  int64_t batch;  // among the owned batches

  __device__ __forceinline__ BiasTileIndex(const BiasOwnership& ownership, int64_t block) {
    col = static_cast<int32_t>(block % ownership.owned_col_tiles);
    block /= ownership.owned_col_tiles;
    row = static_cast<int32_t>(block % ownership.owned_row_tiles);
    block /= ownership.owned_row_tiles;
    head = static_cast<int32_t>(block % ownership.owned_heads);
    batch = block / ownership.owned_heads;
  }
};

// Writes a tile of the dbias that begins at index `first`, after summing the tile's rows or columns
// if dbias has only one.
__device__ __forceinline__ void store_bias_tile(const Backward& params, const BiasTileIndex& own,
                                                int64_t first, float (&total)[1][8][4]) {
  const Shape& shape = params.shape;
  const Operand& dbias = params.dbias;
  if (dbias.row == 0) sum_rows(total);
  if (dbias.col == 0) sum_cols(total);
  const BatchIndex batch(shape, BiasOwnership::batch_index(shape, dbias, own.batch, 0));
  const int64_t base = first + batch.offset(dbias) + own.head * dbias.head;
  const int32_t row_end = dbias.row ? shape.q_len : 1, col_end = dbias.col ? shape.kv_len : 1;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t row = own.row * kGradientBlock + threadIdx.x / 32 * 16 + fragment_row(0, e);
      const int32_t col = own.col * kGradientBlock + fragment_col(n, e);
      if (row < row_end && col < col_end) {
        store_float(dbias, base + row * dbias.row + col * dbias.col, total[0][n][e]);
      }
    }
  }
}

inline constexpr int kBiasGradientBlocks = 512;  // of bias_gradient_kernel, if tiles are divided

// If dbias has few tiles, `parts` thread blocks divide what adds to each of them, and leave their
// sums in float32 arrays of dbias's layout, `elements` apart. bias_parts_kernel adds them in order.
struct BiasParts {
  float* sums = nullptr;
  int64_t elements = 0, terms = 0;  // the last part may have fewer terms
  int32_t parts = 1;

  BiasParts() = default;
  // `all_terms`: the number of terms of a tile that can be divided. The number of blocks is a
  // constant, so that results do not depend on the GPU's. The memory is that of the sums for
  // dquery, which have been converted before.
  BiasParts(const Backward& params, const BackwardWorkspace& workspace,
            const BiasOwnership& ownership, int64_t all_terms, int64_t most_blocks)
      : terms(all_terms) {
    const Shape& shape = params.shape;
    const int64_t tiles = ownership.blocks();
    if (workspace.dquery == nullptr || tiles == 0 || tiles >= most_blocks) return;
    const Operand& dbias = params.dbias;
    int64_t width = dbias.col ? shape.kv_len : 1;  // with padding, if there are several rows
    for (const int64_t stride :
         {dbias.batch[0], dbias.batch[1], dbias.batch[2], dbias.batch[3], dbias.head, dbias.row}) {
      if (stride) width = stride;
    }
    elements = ownership.owned * ownership.owned_heads * (dbias.row ? shape.q_len : 1) * width;
    const int64_t room =
        shape.batch * shape.heads * workspace.dquery_rows * shape.head_dim / elements;
    const int64_t most = std::max<int64_t>(std::min(most_blocks / tiles, room), 1);
    terms = std::max<int64_t>(ceil_div(all_terms, most), 1);
    parts = static_cast<int32_t>(std::max<int64_t>(ceil_div(all_terms, terms), 1));
    if (parts > 1) sums = workspace.dquery;
  }
  // Returns a call whose dbias is the first of these arrays.
  Backward of(const Backward& params) const {
    Backward partial = params;
    if (parts == 1) return partial;
    partial.dbias.data = sums;
    partial.dbias.dtype = DType::kFloat32;
    return partial;
  }
};
static_assert(kMaxBatchDims == 4);

// Adds the parts, if there are several. Compiled in kernels.cu.
Status launch_bias_parts(const Backward& params, const BiasParts& parts, cudaStream_t stream);

template <typename Element>
__global__ void __launch_bounds__(kGradientThreads, 2)
    bias_gradient_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                         const BiasOwnership ownership, const BiasParts parts) {
  const int64_t count = ownership.summed_tiles();
  const auto part = static_cast<int32_t>(blockIdx.x % parts.parts);
  const BiasTileIndex own(ownership, blockIdx.x / parts.parts);
  float total[1][8][4];
  set_zero(total);
  const int64_t end = min((part + 1) * parts.terms, count);
  for (int64_t index = part * parts.terms; index < end; ++index) {
    int64_t rest = index;
    const auto next = [&](int32_t first, int32_t owned, int32_t all) {
      const int64_t place = rest % (all / owned);
      rest /= all / owned;
      return first + static_cast<int32_t>(place) * owned;
    };
    const int32_t col = next(own.col, ownership.owned_col_tiles, ownership.col_tiles);
    const int32_t row = next(own.row, ownership.owned_row_tiles, ownership.row_tiles);
    const int32_t head = next(own.head, ownership.owned_heads, ownership.heads);
    const int64_t batch = BiasOwnership::batch_index(params.shape, params.dbias, own.batch, rest);
    add_score_gradient<Element>(total, params, workspace, batch, head, row * kGradientBlock,
                                col * kGradientBlock);
  }
  store_bias_tile(params, own, part * parts.elements, total);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    bias_parts_kernel(const Operand dbias, const BiasParts parts) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= parts.elements) return;
  float sum = 0.0f;
  for (int32_t part = 0; part < parts.parts; ++part) {
    sum += parts.sums[part * parts.elements + index];
  }
  store_float(dbias, index, sum);
}

}  // namespace jax_flash
