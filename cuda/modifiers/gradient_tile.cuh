// Computes dS of a tile of 64x64 logits of one batch and head once more, for the kernels that sum
// it: those of the bias's gradient and of the gradients by distance.
//
//   S = Q K^T,  P = exp(logits - lse),  dP = dO V^T,  dS = P (dP - delta)
//
// Thread blocks have 128 threads, and a warp owns 16 rows. Shared memory holds 64 columns of both
// operands of a product at a time.
#pragma once

#include <cstdint>

#include "modifiers/score_gradient.cuh"
#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/element.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash {

inline constexpr int kGradientBlock = 64;
inline constexpr int kGradientThreads = 128;
template <typename Element>
using GradientTile = SmemTile<kGradientBlock, 64, sizeof(Element)>;
template <typename Element>
inline constexpr int kGradientSmemBytes = 2 * GradientTile<Element>::kBytes;

// Computes products += A B^T for 64 rows of A, 16 per warp, and 64 rows of B.
template <typename Element>
__device__ __forceinline__ void add_products(float (&products)[1][8][4], const Element* a_gmem,
                                             int64_t a_stride, int32_t row0, int32_t row_end,
                                             const Element* b_gmem, int64_t b_stride, int32_t col0,
                                             int32_t col_end, int32_t dim) {
  extern __shared__ __align__(1024) uint8_t smem[];
  using Tile = GradientTile<Element>;
  const Tile a_smem{ptx::shared_address(smem), 0};
  const Tile b_smem{a_smem.root, Tile::kBytes};
  const BlockReader a_reader(a_smem, BlockOrder::kRowsFirst, threadIdx.x / 32 * 16, 0);
  const BlockReader b_reader(b_smem, BlockOrder::kColsFirst, 0, 0);
  for (int32_t k0 = 0; k0 < dim; k0 += 64) {
    __syncthreads();  // no thread still reads the previous tiles
    load_tile<kGradientThreads>(a_smem, a_gmem + k0, a_stride, row0, row0, row_end, dim - k0);
    load_tile<kGradientThreads>(b_smem, b_gmem + k0, b_stride, col0, col0, col_end, dim - k0);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    matmul<Element, 64 / kStepCols<Element>, kRolled>(
        products, [&](uint32_t (&a)[4], int, int k) { ptx::ldmatrix_x4(a, a_reader.at(0, k * 2)); },
        [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, b_reader.at(n * 8, k * 2)); });
  }
}

// Adds dS of one tile of one batch and head to `total`.
template <typename Element>
__device__ __forceinline__ void add_score_gradient(float (&total)[1][8][4], const Backward& params,
                                                   const BackwardWorkspace& workspace,
                                                   int64_t batch_index, int32_t head, int32_t row0,
                                                   int32_t col0) {
  const Shape& shape = params.shape;
  const BatchIndex batch(shape, batch_index);
  const Band band(params, batch);
  const Range range = kv_tiles<kGradientBlock>(band, row0, row0 + kGradientBlock);
  if (col0 / kGradientBlock < range.first || col0 / kGradientBlock >= range.end) return;
  const SegmentSpans& spans = workspace.spans;
  if (spans.query) {
    const SegmentSpan query_span = tile_span<kGradientBlock>(
        spans.query + batch_index * spans.query_blocks, spans.query_blocks, row0 / kGradientBlock);
    const SegmentSpan key_span = tile_span<kGradientBlock>(
        spans.key + batch_index * spans.key_blocks, spans.key_blocks, col0 / kGradientBlock);
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
  const ScoreGradient<true, 1, 8, Element> gradient(params, batch, head, warp_row0, col0);
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

}  // namespace jax_flash
