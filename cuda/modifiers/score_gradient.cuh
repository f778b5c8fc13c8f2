// Computes, in accumulator fragments of S = Q K^T and dP = dO V^T:
//
//   P = exp(S - lse),  dS = P (D(dP) - delta) times the slope of the soft cap    D: dropout
//
// The second half of the file handles keys that are NaN or infinite. score_gradient_transposed.cuh
// is for fragments of S^T and dP^T.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/logits.cuh"
#include "modifiers/scores.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/element.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash {

// Handles the fragments whose element [0, 0] is (row0, col0) of one batch and head. kGeneral: the
// call may have modifiers. Element: the operands' element type.
template <bool kGeneral, int kM, int kN, typename Element>
struct ScoreGradient {
  const Forward& params;
  const BatchIndex& batch;
  int32_t head, row0, col0;

  __device__ __forceinline__ ScoreGradient(const Forward& forward, const BatchIndex& index,
                                           int32_t query_head, int32_t row, int32_t col)
      : params(forward), batch(index), head(query_head), row0(row), col0(col) {}

  __device__ __forceinline__ void mask(float (&scores)[kM][kN][4], const Band& band) const {
    if constexpr (kGeneral && kIsFloat32<Element>) {
      modify_tile(scores, params, batch, head, band, row0, col0);
    } else if constexpr (kGeneral) {
      LogitModifiers(params, batch, head).apply(scores, band, row0, col0);
    } else {
      mask_band(scores, band, row0, col0);
    }
  }

  // Computes P = exp(S - lse) for blocks [first, end) of the m-th 16 rows. If kGeneral, S and lse
  // have the units of logits; otherwise S is multiplied by to_log2 here, and lse is in log2 units.
  __device__ __forceinline__ void probabilities(float (&scores)[kN][4], const float (&lse)[2],
                                                float to_log2, int m, int first, int end) const {
    if constexpr (kGeneral) {
      if (in_natural_units(params)) return natural_probabilities(scores, lse, m, first, end);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (n < first || n >= end) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] =
            ptx::ex2_approx_ftz(fmaf(scores[n][e], kGeneral ? 1.0f : to_log2, -lse[e / 2]));
      }
    }
  }

  // Computes exp((S - lse) - lse_low), for calls with natural units. lse_low is read only if it may
  // matter: if lse is extreme, or if products are exact enough (Tf32x3).
  __device__ __forceinline__ void natural_probabilities(float (&scores)[kN][4],
                                                        const float (&lse)[2], int m, int first,
                                                        int end) const {
    float low[2] = {};
    if (std::is_same_v<Element, Tf32x3> ||
        __any_sync(0xffffffff, is_extreme(lse[0]) || is_extreme(lse[1]))) {
      const float* lse_low = batch.template pointer<const float>(params.lse_low, head);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = min(row0 + fragment_row(m, 2 * half), params.shape.q_len - 1);
        low[half] = lse_low[row * params.lse_low.row] * kLog2E;
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (n < first || n >= end) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float difference = scores[n][e] - lse[e / 2];
        scores[n][e] = ptx::ex2_approx_ftz(fmaf(difference, kLog2E, -low[e / 2]));
      }
    }
  }

  // Turns dP into dS = P (dP - delta), and P into the operand of dV, from which dropped elements
  // are removed. An element that is not allowed has P = 0 and dS = 0, even if its dP is NaN.
  __device__ __forceinline__ void finish(float (&p)[kM][kN][4], float (&dp)[kM][kN][4],
                                         const float (&lse)[kM][2],
                                         const float (&delta)[kM][2]) const {
    if constexpr (!kGeneral) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[m][n][e] = p[m][n][e] * (dp[m][n][e] - delta[m][e / 2]);
        }
      }
    } else {
      const Options& options = params.options;
      if constexpr (kIsFloat32<Element>) {
        if (options.dropout_threshold == 0 && !(options.logits_soft_cap > 0.0f)) {
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int n = 0; n < kN; ++n) {
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const float ds = p[m][n][e] * (dp[m][n][e] - delta[m][e / 2]);
                dp[m][n][e] = p[m][n][e] == 0.0f ? 0.0f : ds;
              }
            }
          }
          return;
        }
      }
      const LogitModifiers modifiers(params, batch, head);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Kept kept = {{0xffffffff, 0xffffffff}};
        if (options.dropout_threshold != 0) {
          kept = modifiers.template kept<kN>(row0 + m * 16, col0);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              const float factor = kept.template at<false>(n, e) ? options.dropout_scale : 0.0f;
              float ds = p[m][n][e] * (dp[m][n][e] * factor - delta[m][half]);
              if (options.logits_soft_cap > 0.0f) {
                ds *= soft_cap_slope(params, p[m][n][e], lse[m][half]);
              }
              dp[m][n][e] = p[m][n][e] == 0.0f ? 0.0f : ds;
              p[m][n][e] *= factor;
            }
          }
        }
      }
    }
  }
};

// Returns true if an element of a word is NaN or infinite: its exponent is all ones.
template <typename Element>
__device__ __forceinline__ bool has_bad_element(uint32_t pair) {
  constexpr uint32_t kExponent = kIsFloat32<Element>               ? 0x7f800000u
                                 : std::is_same_v<Element, __half> ? 0x7c00u
                                                                   : 0x7f80u;
  if constexpr (kIsFloat32<Element>) return (pair & kExponent) == kExponent;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// Replaces keys that are NaN or infinite by zeros. If a mask or segments hide such a key from every
// query, it must not reach dQ, where the product with dS = 0 would be NaN. mark_bad_keys() then
// sets the queries that do attend to such keys to NaN. `bad_smem` has one bit per row, followed by
// a word that is set if any of these bits is.
template <int kThreads, typename Element, typename Tile>
__device__ __forceinline__ void clear_bad_keys(const Tile& key, uint32_t* bad_smem) {
  if (threadIdx.x <= Tile::kRows / 32) bad_smem[threadIdx.x] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < Tile::kRows; row += kThreads) {
    bool bad = false;
    for (int chunk = 0; chunk < Tile::kCols / Tile::kChunkCols; ++chunk) {
      const uint4 words = ptx::ld_shared_v4(key.address(row, chunk));
      bad |= has_bad_element<Element>(words.x) || has_bad_element<Element>(words.y) ||
             has_bad_element<Element>(words.z) || has_bad_element<Element>(words.w);
    }
    if (!bad) continue;
    atomicOr(&bad_smem[row / 32], 1u << row % 32);
    bad_smem[Tile::kRows / 32] = 1;
    for (int chunk = 0; chunk < Tile::kCols / Tile::kChunkCols; ++chunk) {
      ptx::st_shared_v4(key.address(row, chunk), make_uint4(0, 0, 0, 0));
    }
  }
  __syncthreads();
}

template <int kRows, int kM, int kN>
__device__ __forceinline__ void mark_bad_keys(float (&scores)[kM][kN][4], const uint32_t* bad_smem,
                                              int col0) {
  if (bad_smem[kRows / 32] == 0) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int col = col0 + fragment_col(n, e);
      if (!(bad_smem[col / 32] >> col % 32 & 1)) continue;
#pragma unroll
      for (int m = 0; m < kM; ++m) scores[m][n][e] = __int_as_float(0x7fffffff);
    }
  }
}

}  // namespace jax_flash
