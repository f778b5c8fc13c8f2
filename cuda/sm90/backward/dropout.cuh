// Applies dropout in the backward kernels that are compiled for dropout.
//
//   dV = c D(P)^T dO,  dS = P (c D(dP) - delta)    D: zeroes dropped elements; c: dropout_scale
//
// A tile's random words are drawn while the warp would otherwise wait for products. The sign bit of
// P then marks dropped elements, so that no register holds the bits until dP is complete. Rounding
// with .relu gives D(P). With P' for P with this sign,
//
//   (P' + |P'|) dP - |P'| (2 delta / c) = 2 dS / c,
//
// which takes one instruction an element more than without dropout. dropout_scales() has the
// factors of delta, dK and dQ that follow; dV is multiplied by c at the end.
#pragma once

#include <cstdint>

#include "modifiers/dropout.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "sm90/backward/plan.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash::sm90 {

// Returns the factors of delta and of dQ. The factor of dK is that of dQ.
JAX_FLASH_HOST_DEVICE inline GradientScales dropout_scales(const Options& options) {
  return {2.0f / options.dropout_scale, 0.5f * options.dropout_scale * options.scale};
}

// Draws random words for fragments of S^T of 16 keys by 64 queries, and applies them.
struct TransposedDropout {
  static constexpr int kN = 8;
  using Words = KeptGroups<kN>;

  Dropout dropout;
  uint32_t threshold;

  __device__ __forceinline__ void begin(const Forward& params, const BatchIndex& batch,
                                        int32_t head) {
    dropout = Dropout(params, batch, head).uniform();
    threshold = params.options.dropout_threshold;
  }
  // Draws for the queries from row0 on and the keys from key0 on.
  __device__ __forceinline__ void draw(Words& words, int32_t row0, int32_t key0) const {
    dropout.draw_all<kN, true>(words, threshold, row0, key0);
  }

  // Turns S^T into P^T, with the sign bit set where it is dropped.
  template <typename Columns>
  static __device__ __forceinline__ void probabilities(float (&scores)[kN][4], const Words& words,
                                                       const Columns& lse, float to_log2) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 shift = lse(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p =
            ptx::ex2_approx_ftz(fmaf(scores[n][e], to_log2, e % 2 ? -shift.y : -shift.x));
        const uint32_t word = words[n / 2][e % 2].word[n % 2];
        const uint32_t sign = ~(e < 2 ? word << 16 : word) & 0x80000000;
        scores[n][e] = __uint_as_float(__float_as_uint(p) | sign);
      }
    }
  }

  // Rounds P^T to register operands; dropped elements become 0.
  template <typename Element>
  static __device__ __forceinline__ void round(uint32_t (&out)[kN / 2][4],
                                               const float (&signed_p)[kN][4]) {
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&block)[4] = signed_p[2 * k + i / 2];
        out[k][i] = ptx::cvt_rn_relu_x2<Element>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
      }
    }
  }

  // Turns dP^T into 2 dS^T / c; delta_smem has 2 delta / c. With kForbids, an element that is not
  // allowed has dS = 0, even if its dP is NaN.
  template <bool kForbids>
  static __device__ __forceinline__ void finish(const float (&signed_p)[kN][4], float (&dp)[kN][4],
                                                const float* delta_smem) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 delta = ColumnsInShared(delta_smem)(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = fabsf(signed_p[n][e]);
        const float ds = fmaf(signed_p[n][e] + p, dp[n][e], -(p * (e % 2 ? delta.y : delta.x)));
        dp[n][e] = kForbids && p == 0.0f ? 0.0f : ds;
      }
    }
  }
};

// Replaces TransposedDropout in calls without dropout.
struct NoDropout {
  struct Words {};
  __device__ __forceinline__ void begin(const Forward&, const BatchIndex&, int32_t) {}
  __device__ __forceinline__ void draw(Words&, int32_t, int32_t) const {}
};

}  // namespace jax_flash::sm90
