// Handles keys that are NaN or infinite, for kernels whose products read shared memory through the
// asynchronous proxy. modifiers/score_gradient.cuh explains why such keys need care.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash {

// Do the same as clear_bad_keys() and mark_bad_keys() of modifiers/score_gradient.cuh, with
// kThreads threads, which a named barrier synchronizes, and fragments of S^T: 16 keys from `key` of
// the tile on. `thread`: the index of the calling thread among these.
template <int kThreads, typename Element, typename Tile>
__device__ __forceinline__ void clear_bad_key_rows(const Tile& key, uint32_t* bad_smem, int thread,
                                                   int barrier) {
  // An element with this exponent, all ones, is NaN or infinite.
  constexpr uint32_t kExponent = std::is_same_v<Element, __half> ? 0x7c00u : 0x7f80u;
  if (thread <= Tile::kRows / 32) bad_smem[thread] = 0;
  ptx::barrier_sync(barrier, kThreads);
  for (int row = thread; row < Tile::kRows; row += kThreads) {
    bool bad = false;
    for (int chunk = 0; chunk < Tile::kCols / kChunk; ++chunk) {
      const uint4 words = ptx::ld_shared_v4(key.address(row, chunk));
      for (const uint32_t pair : {words.x, words.y, words.z, words.w}) {
        bad |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
      }
    }
    if (!bad) continue;
    atomicOr(&bad_smem[row / 32], 1u << row % 32);
    bad_smem[Tile::kRows / 32] = 1;
    for (int chunk = 0; chunk < Tile::kCols / kChunk; ++chunk) {
      ptx::st_shared_v4(key.address(row, chunk), uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(barrier, kThreads);
}

template <int kRows, int kN>
__device__ __forceinline__ void mark_bad_key_rows(float (&scores)[kN][4], const uint32_t* bad_smem,
                                                  int key) {
  if (bad_smem[kRows / 32] == 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = key + fragment_row(0, 2 * half);
    if (!(bad_smem[row / 32] >> row % 32 & 1)) continue;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      scores[n][2 * half] = scores[n][2 * half + 1] = __int_as_float(0x7fffffff);
    }
  }
}

}  // namespace jax_flash
