// Computes the backward pass for head dims above 128, unless sm90/backward/pieces_consumer.cuh
// does. There, the accumulators of dK and dV leave no room for more than 64 keys a block, and dQ's
// sums would bound a single kernel. So there are two kernels: both compute S and dP, and neither
// sums in global memory. Both are deterministic.
//
//   backward_wide_key_kernel     for each query tile, 64 rows:
//     warpgroup 0   S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - lse) to shared memory, dV += P^T dO
//     warpgroup 1   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
//   backward_wide_query_kernel   for each key tile, 64 keys; a warpgroup owns 64 rows:
//     S = Q K^T,  dP = dO V^T,  P = ...,  dS = ...,  dQ += dS K
//
// A warpgroup starts the next tile's S or dP right after the product that adds to its accumulators:
// its part of the tile's stage is then free while S or dP runs, which hides the next copy to that
// part. Exponentials and dS overlap the other warpgroup's products. Warp 0 starts the copies.
// Blocks of the second kernel start on multiprocessors that the first leaves idle, and need not
// wait: they are let in when the last block of the first has seen that what both read is complete.
// The first kernel is in sm90/backward/wide_key.cuh, the second in sm90/backward/wide_query.cuh;
// this file has the products of both. The shared-memory layouts are in sm90/backward/config.cuh.
#pragma once

#include <cstdint>

#include "ptx/warpgroup.cuh"
#include "sm90/backward/fragments.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Numbers the named barriers: one of both consumers, and one of each.
enum WideBarrier : int { kWideConsumers = 1, kWideZeroed = 2 };

// Returns a tile's rows from row0 on, a multiple of 8. The offset becomes part of the tile's
// address, which is in one register, not of every descriptor.
template <typename Tile>
__device__ __forceinline__ Tile rows_from(Tile tile, int row0) {
  tile.offset += row0 * 128;
  return tile;
}

// Computes d = 64 rows of a, from its first on, times b^T.
template <typename Element, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void start_product_k_major(float (&d)[kN / 8][4], TileA a,
                                                      const TileB& b) {
  // Without this, the compiler keeps all descriptors of an invariant operand, and spills them.
  asm volatile("" : "+r"(a.root));
  forget(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < TileA::kCols / 16; ++k) {
    ptx::Wgmma<Element, kN>::template ss<0, 0>(d, operand_k_major(a, 0, k),
                                               operand_k_major(b, 0, k), k > 0);
  }
  ptx::wgmma_commit_group();
}

// Computes d += a b for a in registers; b's rows are the inner dimension.
template <typename Element, int kN, int kSteps, typename Tile>
__device__ __forceinline__ void start_product_add(float (&d)[kN / 8][4],
                                                  const uint32_t (&a)[kSteps][4], const Tile& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::Wgmma<Element, kN>::template rs<1>(d, a[k], operand_mn_major(b, 0, k), 1);
  }
  ptx::wgmma_commit_group();
}

}  // namespace jax_flash::sm90
