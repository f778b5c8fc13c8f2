// Does what modifiers/score_gradient.cuh does, for fragments of the transposed products S^T = K Q^T
// and dP^T = V dO^T: a fragment's rows are keys, its columns queries. P^T and dS^T are then
// register operands of dV = P^T dO and dK = dS^T Q. lse and delta are values of columns.
#pragma once

#include <cstdint>

#include "modifiers/band.cuh"
#include "modifiers/logits.cuh"
#include "modifiers/scores_transposed.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Reads the values of a thread's columns from shared memory at each use.
struct ColumnsInShared {
  const float* smem;  // points to the fragments' first column

  __device__ __forceinline__ explicit ColumnsInShared(const float* from) : smem(from) {}
  __device__ __forceinline__ float2 operator()(int n) const {
    return *reinterpret_cast<const float2*>(smem + fragment_col(n, 0));
  }
};
// Reads the values to registers at construction, ahead of the next wait.
template <int kN>
struct ColumnsInRegisters {
  float2 values[kN];

  __device__ __forceinline__ explicit ColumnsInRegisters(const float* from) {
    const uint32_t address = ptx::shared_address(from + fragment_col(0, 0));
#pragma unroll
    for (int n = 0; n < kN; ++n) values[n] = ptx::ld_shared_v2_f32(address + n * 32);
  }
  __device__ __forceinline__ float2 operator()(int n) const { return values[n]; }
};

// Handles the fragments whose element [0, 0] is (key0, row0) of one batch and query head: 16 keys
// by 8 kN queries. `lse_smem` and `delta_smem` begin at query row0. kModifiers: modifiers that are
// applied here if the call has them. kScaled: dS is multiplied by the scale. Without kModifiers,
// delta has been multiplied by it already. kExact: products are as exact as those of float32, so
// lse_low matters.
template <uint32_t kModifiers, int kN, bool kManyRegisters = false, bool kScaled = false,
          bool kExact = false>
struct TransposedGradient {
  static constexpr bool kGeneral = kModifiers != kNoModifier;

  const Forward& params;
  const BatchIndex& batch;
  int32_t head, key0, row0;

  // Sets elements that are not allowed to -inf. If kGeneral, also turns products into logits. Sets
  // `slopes` for finish().
  __device__ __forceinline__ void mask(float (&scores)[kN][4], const Band& band,
                                       CapSlopes<kN>* slopes = nullptr) const {
    if constexpr (kGeneral) {
      modify_transposed<kManyRegisters, kModifiers>(scores, modifiers(), band, key0, row0, slopes);
      // Rows beyond the end get modifiers, too, perhaps NaN, so they are masked below.
      const int32_t row1 = row0 + 8 * kN;
      if (row1 <= band.q_len && band.all_allowed(row0, row1, key0, key0 + 16)) return;
    }
    mask_band_transposed(scores, band, key0, row0);
  }

  // Computes P^T = exp(S^T - lse) with each column's lse. If kGeneral, S and lse have the units of
  // logits; otherwise S is multiplied by to_log2 here, and lse is in log2 units.
  template <typename Columns>
  __device__ __forceinline__ void probabilities(float (&scores)[kN][4], const Columns& columns,
                                                const float* lse_smem, float to_log2) const {
    if constexpr (kModifiers == kBias) {
      natural_probabilities(scores, columns, lse_smem);
    } else {
      if constexpr (kGeneral) {
        if (in_natural_units(params)) return natural_probabilities(scores, columns, lse_smem);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 lse = columns(n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[n][e] = ptx::ex2_approx_ftz(
              fmaf(scores[n][e], kGeneral ? 1.0f : to_log2, e % 2 ? -lse.y : -lse.x));
        }
      }
    }
  }

  // Turns dP into dS = P (dP - delta). An element that is not allowed has P = 0 and, with kForbids,
  // dS = 0, even if its dP is NaN.
  template <bool kForbids = kGeneral>
  __device__ __forceinline__ void finish(const float (&p)[kN][4], float (&dp)[kN][4],
                                         const float* lse_smem, const float* delta_smem,
                                         const Kept& kept,
                                         const CapSlopes<kN>* slopes = nullptr) const {
    const Options& options = params.options;
    if constexpr ((kModifiers & kDropout) != 0) drop(dp, kept);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 delta = ColumnsInShared(delta_smem)(n);
      if (kScaled && kGeneral) {
        delta.x *= options.scale;
        delta.y *= options.scale;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float ds =
            p[n][e] * (kScaled ? fmaf(dp[n][e], options.scale, e % 2 ? -delta.y : -delta.x)
                               : dp[n][e] - (e % 2 ? delta.y : delta.x));
        dp[n][e] = kForbids && p[n][e] == 0.0f ? 0.0f : ds;
      }
    }
    if ((kModifiers & kSoftCap) == 0 || options.logits_soft_cap <= 0.0f) return;
    if (slopes != nullptr) return slopes->multiply(p, dp);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float slope = soft_cap_slope(params, p[n][e], lse_smem[fragment_col(n, e % 2)]);
        dp[n][e] = p[n][e] == 0.0f ? 0.0f : dp[n][e] * slope;
      }
    }
  }

  // Returns the factor that dropout multiplies an element by.
  __device__ __forceinline__ float factor(const Kept& kept, int n, int e) const {
    return kept.template at<true>(n, e) ? params.options.dropout_scale : 0.0f;
  }

  // Turns P^T into the operand of dV: applies dropout.
  __device__ __forceinline__ void drop(float (&p)[kN][4], const Kept& kept) const {
    if (params.options.dropout_threshold == 0) return;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) p[n][e] *= factor(kept, n, e);
    }
  }

  // Returns the elements that dropout keeps.
  __device__ __forceinline__ Kept draw() const {
    if ((kModifiers & kDropout) != 0 && params.options.dropout_threshold != 0) {
      return modifiers().template kept<kN, true>(row0, key0);
    }
    return {{0xffffffff, 0xffffffff}};
  }

 private:
  // Computes exp((S - lse) - lse_low), for calls with natural units. Unless kExact, lse_low is read
  // only if a lse is extreme; otherwise it is nearly 0.
  template <typename Columns>
  __device__ __forceinline__ void natural_probabilities(float (&scores)[kN][4],
                                                        const Columns& columns,
                                                        const float* lse_smem) const {
    const auto exponentials = [&](auto low) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float2 lse = columns(n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float difference = scores[n][e] - (e % 2 ? lse.y : lse.x) - low(n, e % 2);
          scores[n][e] = ptx::ex2_approx_ftz(difference * kLog2E);
        }
      }
    };
    bool extreme = kExact;
#pragma unroll
    for (int column = 0; column < 8 * kN; column += 32) {
      extreme |= is_extreme(lse_smem[column + threadIdx.x % 32]);
    }
    if (__any_sync(0xffffffff, extreme)) {
      const float* lse_low = batch.template pointer<const float>(params.lse_low, head);
      exponentials([&](int n, int e) {
        const int32_t row = min(row0 + fragment_col(n, e), params.shape.q_len - 1);
        return lse_low[row * params.lse_low.row];
      });
    } else {
      exponentials([](int, int) { return 0.0f; });
    }
  }

  __device__ __forceinline__ LogitModifiers modifiers() const {
    return LogitModifiers(params, batch, head);
  }
};

}  // namespace jax_flash
