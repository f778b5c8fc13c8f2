// Defines steps that Hopper's kernels for float32 share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/float32_tiles.h"
#include "ptx/shared.cuh"
#include "ptx/tf32.cuh"
#include "ptx/warpgroup.cuh"
#include "status.h"
#include "tile/element.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/wgmma_tile.cuh"
#include "wgmma.h"

namespace jax_flash::sm90 {

// Calls launch(modifiers), where the modifiers are those of the kernel that takes the call, as a
// constant.
template <bool kGeneral, typename Launch>
Status with_float32_modifiers(const Forward& params, Launch launch) {
  if constexpr (!kGeneral) {
    return launch(std::integral_constant<uint32_t, kNoModifier>{});
  } else {
    if ((float32_modifiers(params) & ~kFloat32Elements) == 0) {
      return launch(std::integral_constant<uint32_t, kFloat32Elements>{});
    }
    return launch(std::integral_constant<uint32_t, kFloat32Modifiers>{});
  }
}

// Starts the product of 64 rows and the rows of another tile, d = a b^T.
template <int kHeadDim, int kN, typename TileA, typename TileB>
__device__ __forceinline__ void start_product(float (&d)[kN][4], const TileA& a, const TileB& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kHeadDim / 8; ++k) {
    ptx::Wgmma<Tf32, 8 * kN>::ss(d, descriptor_k_major(a, 0, k), descriptor_k_major(b, 0, k),
                                 k != 0);
  }
  ptx::wgmma_commit_group();
}
// Does the same for rows in registers.
template <int kN, int kSteps, typename TileB>
__device__ __forceinline__ void start_product(float (&d)[kN][4], const uint32_t (&a)[kSteps][4],
                                              const TileB& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::Wgmma<Tf32, 8 * kN>::rs(d, a[k], descriptor_k_major(b, 0, k), k != 0);
  }
  ptx::wgmma_commit_group();
}

// Starts the addition of a product, d += a b, where the tile is that of b transposed.
template <int kN, int kSteps, typename TileB>
__device__ __forceinline__ void start_addition(float (&d)[kN][4], const uint32_t (&a)[kSteps][4],
                                               const TileB& b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    ptx::Wgmma<Tf32, 8 * kN>::rs(d, a[k], descriptor_k_major(b, 0, k), 1);
  }
  ptx::wgmma_commit_group();
}

// Rounds accumulators, as operands of the next product: the columns 2 t and 2 t + 1 serve as
// operand columns t and t + 4 (sm90/float32_tiles.cuh).
template <int kN>
__device__ __forceinline__ void round_operands(const float (&from)[kN][4], uint32_t (&to)[kN][4]) {
  constexpr int kElement[4] = {0, 2, 1, 3};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[n][i] = ptx::round_to_tf32(__float_as_uint(from[n][kElement[i]]));
    }
    // Keeps the compiler from rounding after the first product has started, which would make the
    // products wait for each other.
    asm volatile("" : "+r"(to[n][0]), "+r"(to[n][1]), "+r"(to[n][2]), "+r"(to[n][3])::"memory");
  }
}

// Reads this thread's operands of a warp's 16 rows, in the order of tiles of rows. `from` points to
// the first of them. `rows` and `cols` exist, others are zeros.
template <int kSteps>
__device__ __forceinline__ void read_operands(uint32_t (&to)[kSteps][4], const float* from,
                                              int64_t stride, int32_t rows, int32_t cols,
                                              bool vectors) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(0, 2 * half);
    const float* of_row = from + row * stride;
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      const int32_t col = k * 8 + threadIdx.x % 4 * 4;
      float x[4] = {};
      if (vectors) {
        if (row < rows && col < cols) {
          const float4 four = __ldg(reinterpret_cast<const float4*>(of_row + col));
          x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        }
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (row < rows && col + e < cols) x[e] = __ldg(of_row + col + e);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to[k + e / 2][e % 2 * 2 + half] = ptx::round_to_tf32(__float_as_uint(x[e]));
      }
    }
  }
}

// Writes a thread's operands of a warp's 16 rows to a tile of rows, from `row` on.
template <int kSteps, typename Tile>
__device__ __forceinline__ void store_operands(const Tile& tile, int row,
                                               const uint32_t (&from)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * k + i / 2;
      ptx::st_shared_b32(
          tile.address(row + fragment_row(0, 2 * (i % 2)), chunk) + threadIdx.x % 4 * 4,
          from[k][i]);
    }
  }
}

// Stores a warp's 16 rows of a gradient times `scale`, of which `rows` exist.
template <int kN>
__device__ __forceinline__ void store_gradient(const Float32Rows& to, int32_t rows, float scale,
                                               const float (&gradient)[kN][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(0, 2 * half);
    if (row < rows) to.store(row, half, gradient, 0, scale);
  }
}

}  // namespace jax_flash::sm90
