// Applies the soft cap, and its slope, in the backward kernels that are compiled for the soft cap.
//
//   l = cap tanh(s / cap),  P = exp(l - lse),  dS = P (dP - delta) (1 - (l / cap)^2)
//
// P is rounded for dV at once, and then multiplied by the slope, so that no register holds the
// slope until dP is complete. If all products of a warp's tile are small, tanh is computed as a
// polynomial.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "modifiers/soft_cap.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Holds the constants of a call's soft cap, in log2 units. For products s up to `limit`, l = s
// (factor[0] + factor[1] s^2 + ...). The limit is negative if the factors leave float32's range.
struct CapPolynomial {
  static constexpr int kTerms = 5;
  static constexpr float kGreatestCap = 1024.0f;  // P is right to 4e-4
  float factor[kTerms] = {};
  float limit = 0.0f;
  float ratio = 0.0f;           // s * ratio = s / cap in the formula above
  float cap = 0.0f;             // in log2 units
  float inverse_square = 0.0f;  // 1 / cap^2

  CapPolynomial() = default;
  explicit CapPolynomial(const Options& options) {
    if (options.logits_soft_cap <= 0.0f) return;
    // Interpolates tanh(x) / x as a polynomial in x^2 at Chebyshev points, up to x = 0.75; the
    // relative error is 6e-7. That of P is this times the logit.
    constexpr double kTanh[kTerms] = {0.999999424, -0.333281921, 0.132584621, -0.050041609,
                                      0.012916652};
    const double unit = double{options.logits_soft_cap} * 1.4426950408889634;
    const double of_product = double{options.scale} / options.logits_soft_cap;
    for (int i = 0; i < kTerms; ++i) {
      factor[i] = static_cast<float>(kTanh[i] * unit * std::pow(of_product, 2 * i + 1));
    }
    const bool in_range =
        std::all_of(factor, factor + kTerms, [](float x) { return std::isnormal(x); });
    const bool use = in_range && options.logits_soft_cap <= kGreatestCap;
    limit = use ? static_cast<float>(0.75 / std::fabs(of_product)) : -1.0f;
    ratio = static_cast<float>(of_product);
    cap = static_cast<float>(unit);
    inverse_square = static_cast<float>(1.0 / (unit * unit));
  }
};

template <typename Element>
struct CapModifier {
  // Turns S^T into P^T, rounded, and leaves P^T times the slope. kCut: products may be -inf, where
  // a pair is not allowed.
  template <bool kCut, bool kPolynomial, int kN, typename Columns>
  static __device__ __forceinline__ void cap_all(float (&scores)[kN][4],
                                                 uint32_t (&rounded)[kN / 2][4], const Columns& lse,
                                                 const CapPolynomial& cap) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 shift = lse(n);
      float p[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float score = scores[n][e];
        float logit;
        if constexpr (kPolynomial) {
          const float square = score * score;
          float sum = cap.factor[CapPolynomial::kTerms - 1];
#pragma unroll
          for (int i = CapPolynomial::kTerms - 2; i >= 0; --i) {
            sum = fmaf(sum, square, cap.factor[i]);
          }
          logit = score * sum;
        } else {
          logit = cap.cap * tanh_accurate(score * cap.ratio);
        }
        p[e] = ptx::ex2_approx_ftz(logit - (e % 2 ? shift.y : shift.x));
        if (kCut && score == minus_infinity()) p[e] = 0.0f;
        scores[n][e] = p[e] * fmaf(logit * logit, -cap.inverse_square, 1.0f);
      }
      rounded[n / 2][n % 2 * 2] = ptx::cvt_rn_x2<Element>(p[0], p[1]);
      rounded[n / 2][n % 2 * 2 + 1] = ptx::cvt_rn_x2<Element>(p[2], p[3]);
    }
  }

  // `cut`: true if products may be -inf; uniform in the warp.
  template <int kN, typename Columns>
  static __device__ __forceinline__ void probabilities(float (&scores)[kN][4],
                                                       uint32_t (&rounded)[kN / 2][4],
                                                       const Columns& lse, const CapPolynomial& cap,
                                                       bool cut) {
    if (cut) return cap_all<true, false>(scores, rounded, lse, cap);
    float greatest = 0.0f;  // fmaxf ignores NaN; the polynomial propagates it
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) greatest = fmaxf(greatest, fabsf(scores[n][e]));
    }
    if (__all_sync(0xffffffff, greatest <= cap.limit)) {
      cap_all<false, true>(scores, rounded, lse, cap);
    } else {
      cap_all<false, false>(scores, rounded, lse, cap);
    }
  }
};

}  // namespace jax_flash::sm90
