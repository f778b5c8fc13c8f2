// Computes acc += A B with mma.sync for one warp's share of a tile. Operands come from shared
// memory or registers, through functions of the caller.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ptx/mma.cuh"
#include "ptx/tf32.cuh"
#include "tile/element.cuh"

namespace jax_flash {

// Flags of products of float32 operands.
//   kRoundedA, kRoundedB  the operand has been rounded to TF32 already, if products are in TF32
//   kRolled               no register index depends on the step, so the loop need not be unrolled.
//                         Split products, whose parts take many registers, then take few steps at a
//                         time.
enum ProductFlags : uint32_t { kNoFlag = 0, kRoundedA = 1, kRoundedB = 2, kRolled = 4 };

// Adds A B to acc, for float32 operands. See matmul() below.
template <typename Element, int kSteps, uint32_t kFlags, int kM, int kN, typename LoadA,
          typename LoadB>
__device__ __forceinline__ void matmul_float32(float (&acc)[kM][kN][4], LoadA load_a,
                                               LoadB load_b) {
  constexpr bool kSplit = std::is_same_v<Element, Tf32x3>;
  constexpr int kUnroll = kSplit && (kFlags & kRolled) ? 2 : kSteps;
#pragma unroll kUnroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kM][4], a_rest[kSplit ? kM : 1][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      load_a(a[m], m, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSplit) {
          a[m][i] = ptx::split_rounded(a[m][i], a_rest[m][i]);
        } else if constexpr ((kFlags & kRoundedA) == 0) {
          a[m][i] = ptx::round_to_tf32(a[m][i]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4], b_rest[4];
      load_b(b, n, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSplit) {
          b[i] = ptx::split_truncated(b[i], b_rest[i]);
        } else if constexpr ((kFlags & kRoundedB) == 0) {
          b[i] = ptx::round_to_tf32(b[i]);
        }
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (kSplit) {
            // Tensor cores truncate sums, so a long sum would become too small. Only the products
            // of one step are summed there; the addition to acc rounds.
            float sum[4] = {};
            ptx::mma_m16n8k8_tf32(sum, a_rest[m], b[2 * j], b[2 * j + 1]);
            ptx::mma_m16n8k8_tf32(sum, a[m], b_rest[2 * j], b_rest[2 * j + 1]);
            ptx::mma_m16n8k8_tf32(sum, a[m], b[2 * j], b[2 * j + 1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n + j][e] += sum[e];
          } else {
            ptx::mma_m16n8k8_tf32(acc[m][n + j], a[m], b[2 * j], b[2 * j + 1]);
          }
        }
      }
    }
  }
}

// Adds A B to acc. acc[m][n] are the 16x8 blocks of a [16 kM, 8 kN] matrix; the inner dimension is
// kStepCols<Element> kSteps. load_a(a, m, k) sets the fragment of A's block (m, k), load_b(b, n, k)
// those of the two blocks (k, n) and (k, n + 1) of B, n even.
template <typename Element, int kSteps, uint32_t kFlags = kNoFlag, int kM, int kN, typename LoadA,
          typename LoadB>
__device__ __forceinline__ void matmul(float (&acc)[kM][kN][4], LoadA load_a, LoadB load_b) {
  static_assert(kN % 2 == 0);
  if constexpr (kIsFloat32<Element>) {
    return matmul_float32<Element, kSteps, kFlags>(acc, load_a, load_b);
  } else {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_a(a[m], m, k);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t b[4];
        load_b(b, n, k);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::mma_m16n8k16<Element>(acc[m][n], a[m], b[0], b[1]);
          ptx::mma_m16n8k16<Element>(acc[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
}

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&acc)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
    }
  }
}

// Return the row and column of this thread's element e of block (m, n), within a warp's matrix of
// 16x8 blocks: see ptx::mma_m16n8k16.
__device__ __forceinline__ int fragment_row(int m, int e) {
  return m * 16 + (threadIdx.x % 32) / 4 + e / 2 * 8;
}
__device__ __forceinline__ int fragment_col(int n, int e) {
  return n * 8 + threadIdx.x % 4 * 2 + e % 2;
}

}  // namespace jax_flash
