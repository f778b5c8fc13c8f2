// Has the products of the two backward kernels for head dims above 128 and up to 256, where
// sm90/backward/pieces_consumer.cuh does not apply. The accumulators of dK and dV leave no room for
// more than 64 keys a block, and the additions to dQ in global memory would bound a single kernel.
// Therefore there are two kernels. Both compute S and dP, neither adds in global memory, and both
// are deterministic.
//
//   backward_wide_key_kernel (wide_key.cuh)       for each query tile, 64 rows:
//     warpgroup 0   S^T = K Q^T,  P^T = 2^(scale log2(e) S^T - lse) to shared memory, dV += P^T dO
//     warpgroup 1   dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dK += dS^T Q
//   backward_wide_query_kernel (wide_query.cuh)   for each key tile, 64 keys; 64 rows a warpgroup:
//     S = Q K^T,  dP = dO V^T,  P = ...,  dS = ...,  dQ += dS K
//
// A warpgroup starts the next tile's S or dP right after the product that adds to its accumulators.
// When that product is complete, its operand's stage is free, and the next copy to the stage
// overlaps S or dP. Exponentials and dS overlap the other warpgroup's products. Warp 0 starts the
// copies.
//
// Blocks of the second kernel start on multiprocessors that the first leaves idle. They need not
// wait for its results: they may start once the last block of the first kernel has seen that the
// lse and delta that both read are complete. config.cuh has the shared-memory layouts.
#pragma once

#include <cstdint>

#include "ptx/warpgroup.cuh"
#include "sm90/fragments.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Numbers the named barriers: one for both consumers, and one for each.
enum WideBarrier : int { kWideConsumers = 1, kWideZeroed = 2 };

// Returns a tile's rows from row0 on, a multiple of 8. The offset becomes part of the tile's
// address, which takes one register, instead of part of every descriptor.
template <typename Tile>
__device__ __forceinline__ Tile rows_from(Tile tile, int row0) {
  tile.offset += row0 * 128;
  return tile;
}

// Starts d = a b^T, for the first 64 rows of a.
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

// Starts d += a b, for a in registers. The rows of b are the inner dimension.
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
