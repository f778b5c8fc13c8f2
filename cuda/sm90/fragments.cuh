// Moves tiles between shared memory and the registers of consumer warpgroups: operands of products
// and accumulators. Also zeroes rows that no query may attend to.
#pragma once

#include <cstdint>

#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/smem_tile.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Returns the tile with an address that the compiler cannot follow. Otherwise, it would compute all
// descriptors of an invariant tile before the loop, and spill them.
template <typename Tile>
__device__ __forceinline__ Tile unknown_address(Tile tile) {
  asm volatile("" : "+r"(tile.root));
  return tile;
}

// Returns threadIdx.x as a value that the compiler keeps. Otherwise, it would read the special
// register again at every use, and such a read waits until the tensor cores have accepted all
// products that the warp has started.
__device__ __forceinline__ int kept_thread_index() {
  int index = threadIdx.x;
  asm volatile("" : "+r"(index));
  return index;
}

// Computes the descriptors of wgmma_tile.cuh as sums. The compiler folds their constant terms, so
// that each takes one addition, whereas an `or` with the constant bits takes another instruction.
template <typename Tile>
__device__ __forceinline__ uint64_t summed_descriptor(const Tile& tile, uint32_t leading_bytes,
                                                      uint32_t offset) {
  return descriptor_layout(leading_bytes, 1024) + (offset >> 4) + ((tile.root + tile.offset) >> 4);
}
template <typename Tile>
__device__ __forceinline__ uint64_t operand_k_major(const Tile& tile, int row0, int k) {
  return summed_descriptor(tile, 16, k / 4 * Tile::kPanelBytes + row0 * 128 + k % 4 * 32);
}
template <typename Tile>
__device__ __forceinline__ uint64_t operand_mn_major(const Tile& tile, int col0, int k) {
  return summed_descriptor(tile, Tile::kPanelBytes, col0 / 64 * Tile::kPanelBytes + k * 16 * 128);
}

// Zeroes the rows of a tile outside [first, end): they may hold NaN, and NaN times 0 is not 0.
// Called by kThreads threads from thread 128 on, which `barrier` synchronizes. These are one
// consumer warpgroup, or both. Both are needed if threads read the tile: one consumer must then not
// write the rows of the other.
template <int kThreads = 128, typename Tile>
__device__ __forceinline__ void zero_rows(const Tile& tile, int32_t first, int32_t end,
                                          int barrier) {
  for (int index = (threadIdx.x - 128) % kThreads; index < Tile::kBytes / 16; index += kThreads) {
    const int row = index % (Tile::kPanelBytes / 16) / 8;
    if (row < first || row >= end) {
      ptx::st_shared_v4(tile.root + tile.offset + index * 16, uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, kThreads);
}

// Rounds fragments of 16 rows and kN blocks of 8 columns to register operands of kN / 2 products.
template <typename Element, int kN>
__device__ __forceinline__ void round_fragments(uint32_t (&out)[kN / 2][4],
                                                const float (&values)[kN][4]) {
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&block)[4] = values[2 * k + i / 2];
      out[k][i] = ptx::cvt_rn_x2<Element>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
    }
  }
}

// Stores 64 columns of rounded fragments as rows [row, row + 16) of a panel of a tile. `lane`: the
// caller's.
template <typename Tile>
__device__ __forceinline__ void store_rounded(const Tile& tile, int row, int panel,
                                              const uint32_t (&values)[4][4], int lane) {
  const uint32_t base = tile.address(row + lane % 16, lane / 16) + panel * Tile::kPanelBytes;
#pragma unroll
  for (int k = 0; k < 4; ++k) ptx::stmatrix_x4(base ^ (k * 32), values[k]);
}

// Stores accumulators, times `scale`, as rows [row, row + 16) of a tile.
template <typename Element, typename Tile, int kN>
__device__ __forceinline__ void store_sums(const Tile& tile, int row, float scale,
                                           float (&sums)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= scale;
  }
  uint32_t rounded[kN / 2][4];
  round_fragments<Element>(rounded, sums);
  const int lane = threadIdx.x % 32;
  const uint32_t base = tile.address(row + lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < kN / 2; ++k) {
    ptx::stmatrix_x4((base ^ (k % 4 * 32)) + k / 4 * Tile::kPanelBytes, rounded[k]);
  }
}

// Loads rows [row, row + 16) of a tile as register operands.
template <typename Tile, int kSteps>
__device__ __forceinline__ void load_fragments(uint32_t (&values)[kSteps][4], const Tile& tile,
                                               int row) {
  const BlockReader reader(tile, BlockOrder::kRowsFirst, row, 0);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) ptx::ldmatrix_x4(values[k], reader.at(0, k * 2));
}

// Makes the values undefined for the compiler. A product that overwrites accumulators also has them
// as inputs in its assembly, which would keep their registers occupied until then.
template <int kN>
__device__ __forceinline__ void forget(float (&values)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(values[n][e]));
  }
}

template <int kN>
__device__ __forceinline__ void clear(float (&values)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[n][e] = 0.0f;
  }
}

// Stores accumulators in the order of the workspace: block n of all threads, then block n + 1.
// `thread`: the caller's number in its warpgroup.
template <int kN>
__device__ __forceinline__ void stage_accumulators(uint32_t address_smem,
                                                   const float (&values)[kN][4], int thread) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    ptx::st_shared_v4(address_smem + (n * 128 + thread) * 16,
                      make_uint4(__float_as_uint(values[n][0]), __float_as_uint(values[n][1]),
                                 __float_as_uint(values[n][2]), __float_as_uint(values[n][3])));
  }
}

// Loads the values that the same thread stored, or the thread of the same number in another
// warpgroup.
template <int kN>
__device__ __forceinline__ void load_staged(float (&values)[kN][4], uint32_t address_smem) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const uint4 words = ptx::ld_shared_v4(address_smem + (n * 128 + threadIdx.x % 128) * 16);
    values[n][0] = __uint_as_float(words.x);
    values[n][1] = __uint_as_float(words.y);
    values[n][2] = __uint_as_float(words.z);
    values[n][3] = __uint_as_float(words.w);
  }
}

}  // namespace jax_flash::sm90
