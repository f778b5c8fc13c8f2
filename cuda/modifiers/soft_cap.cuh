// Applies the soft cap, cap tanh(logit / cap), to logits in accumulator fragments, and computes its
// slope for the backward pass.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "modifiers/units.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Returns tanh(x) to within a few units in the last place. The errors of tanh.approx, 2^-11, would
// be noticeable after the multiplication by the cap.
__device__ __forceinline__ float tanh_accurate(float x) {
  // Near 0, 1 - 2 / (exp(2 x) + 1) suffers from cancellation, so the series (error below 2^-24) is
  // used there.
  const float far = 1.0f - __fdividef(2.0f, ptx::ex2_approx_ftz(x * (2.0f * kLog2E)) + 1.0f);
  const float square = x * x;
  const float series =
      fmaf(fmaf(fmaf(-17.0f / 315.0f, square, 2.0f / 15.0f), square, -1.0f / 3.0f), square, 1.0f);
  return fabsf(x) < 0.2f ? x * series : far;
}

// Returns the slope d logit / d (logit before the soft cap) = 1 - (logit / cap)^2. The logit is
// computed again from the element's probability and its row's lse, which has the units of logits:
// keeping all logits would take too many registers.
__device__ __forceinline__ float soft_cap_slope(const Forward& params, float probability,
                                                float lse) {
  const float unit = in_natural_units(params) ? 1.0f : kLn2;
  const float logit = fmaf(lse, unit, __log2f(probability) * kLn2);
  const float inverse = 1.0f / params.options.logits_soft_cap;
  const float ratio = logit * inverse;
  return 1.0f - ratio * ratio;
}

inline constexpr float kTanhRange = 0.75f;

// Replaces logits / cap by logits after the soft cap. kBiased: -inf stays -inf, since a bias of
// -inf forbids the pair.
template <bool kBiased = false, int kN>
__device__ __forceinline__ void soft_cap_ratios(float (&ratios)[1][kN][4], float cap) {
  float greatest = 0.0f;  // fmaxf ignores NaN; the polynomial propagates it
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) greatest = fmaxf(greatest, fabsf(ratios[0][n][e]));
  }
  if (__all_sync(0xffffffff, greatest <= kTanhRange)) {  // holds for most tiles
    // Approximates tanh(x) / x for |x| <= kTanhRange by a polynomial in x^2, which gives tanh to
    // within 4e-8 without a special function. Fitted by Chebyshev interpolation.
    constexpr int kTerms = 6;
    const float factor[kTerms] = {0.999999986f * cap,  -0.333330298f * cap, 0.133261829f * cap,
                                  -0.053377547f * cap, 0.019643430f * cap,  -0.004756069f * cap};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& ratio = ratios[0][n][e];
        const float square = ratio * ratio;
        float sum = factor[kTerms - 1];
#pragma unroll
        for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, factor[i]);
        ratio *= sum;
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& ratio = ratios[0][n][e];
        const float logit = cap * tanh_accurate(ratio);
        ratio = kBiased && ratio == minus_infinity() ? ratio : logit;
      }
    }
  }
}

// Clamps finite logits with a bias, so that their division by a cap below 1 does not overflow.
template <int kN>
__device__ __forceinline__ void keep_finite(float (&logits)[1][kN][4], const Forward& params) {
  if (params.options.logits_soft_cap >= 1.0f) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& logit = logits[0][n][e];
      if (fabsf(logit) > 1e30f && logit != minus_infinity()) logit = copysignf(1e30f, logit);
    }
  }
}

template <bool kBiased, int kN>
__device__ __forceinline__ void soft_cap(float (&logits)[1][kN][4], float cap) {
  const float inverse = 1.0f / cap;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) logits[0][n][e] *= inverse;
  }
  soft_cap_ratios<kBiased>(logits, cap);
}

// Holds the factors by which the soft cap multiplies gradients of logits, 1 - (logit / cap)^2.
// Pairs of them are in float16, which is as exact as the rounding of the gradients.
template <int kN>
struct CapSlopes {
  __half2 pairs[kN][2];

  __device__ __forceinline__ void set(const float (&logits)[kN][4], float cap) {
    const float inverse = 1.0f / cap;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = logits[n][2 * half] * inverse;
        const float second = logits[n][2 * half + 1] * inverse;
        pairs[n][half] = __floats2half2_rn(1.0f - first * first, 1.0f - second * second);
      }
    }
  }
  // Elements that are not allowed keep a gradient of 0: their slope may be NaN.
  __device__ __forceinline__ void multiply(const float (&p)[kN][4],
                                           float (&gradients)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 slopes = __half22float2(pairs[n][half]);
        float& first = gradients[n][2 * half];
        float& second = gradients[n][2 * half + 1];
        first = p[n][2 * half] == 0.0f ? 0.0f : first * slopes.x;
        second = p[n][2 * half + 1] == 0.0f ? 0.0f : second * slopes.y;
      }
    }
  }
};

}  // namespace jax_flash
