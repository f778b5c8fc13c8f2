// Computes the scores of one warp by mma.sync in the sm_90 forward kernel, when a tile is redone
// and the other warps of the warpgroup need not take part.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/ldmatrix.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm90 {

// Gives the same scores as the warpgroup's product, except for the order of additions.
// load_query(a, k) sets the fragment of 16 columns of Q from 16 k on.
template <typename Config, typename Element, int kN, typename LoadQuery>
__device__ __forceinline__ void warp_scores(float (&scores)[1][kN][4],
                                            const typename Config::KeyTile& key_smem,
                                            LoadQuery load_query) {
  const BlockReader key_reader(key_smem, BlockOrder::kColsFirst, 0, 0);
  set_zero(scores);
  matmul<Element, Config::kHeadDim / 16>(
      scores, [&](uint32_t (&a)[4], int, int k) { load_query(a, k); },
      [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, key_reader.at(n * 8, k * 2)); });
}

// Loads such a fragment of Q from global memory. `offset`: that of a base row, in elements. `row`
// and `last` are the distances, in rows, from this base row to the warp's first row and to the last
// row that exists.
template <typename Element>
__device__ __forceinline__ void load_query_rows(uint32_t (&a)[4], const Operand& query,
                                                int64_t offset, int32_t row, int32_t last,
                                                int head_dim, int k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t at = min(row + lane / 4 + i % 2 * 8, last);
    const int col = k * 16 + lane % 4 * 2 + i / 2 * 8;
    const Element* from = static_cast<const Element*>(query.data) + offset + at * query.row + col;
    a[i] = col < head_dim ? *reinterpret_cast<const uint32_t*>(from) : 0;
  }
}

}  // namespace jax_flash::sm90
