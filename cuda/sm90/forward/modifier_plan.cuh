// Derives, on the host, parameters of the sm_90 forward kernels for some modifiers: the
// polynomials of the soft cap, and the order of batches that share a bias or mask.
#pragma once

#include <cmath>
#include <cstdint>

#include "params.h"
#include "plan/mask_matrices.h"
#include "plan/tensor_map.h"

namespace jax_flash::sm90 {

// Approximates the soft cap of a product s as s p(s^2). The polynomial p has scale and cap in its
// coefficients.
struct SoftCapPolynomial {
  static constexpr int kMostTerms = 5;
  float factor[kMostTerms] = {};  // coefficients, for logits in log2 units
  float limit = -1.0f;  // bound of |s| up to which it holds; negative: it must not be used
  // With saturated squares: the bounds that a row's greatest logit so far must meet for a running
  // maximum of 0, and the sum of exponentials, relative to 0, beyond which some product was beyond
  // the limit.
  float least_logit = 0.0f, greatest_logit = -1.0f, greatest_sum = 0.0f;
  // Otherwise: an offset that is added to s^2. Up to the limit, the result has the offset's
  // exponent; beyond it, a greater one, and so a bit that the offset's exponent lacks. A bitwise
  // `or` of many results keeps this bit.
  float offset = 0.0f;

  template <int kTerms>
  __device__ __forceinline__ float value(float square) const {
    float sum = factor[kTerms - 1];
#pragma unroll
    for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, factor[i]);
    return sum;
  }
};

// Plans the soft cap. With `saturates`, Q is multiplied by a power of two, so that |s| is 1 at a
// ratio of logit and cap in [0.5, 1). s^2 is saturated at 1, which costs nothing, so that products
// of any size have some exponential. For a product beyond the limit, the exponential is greater
// than at the limit: the sum shows it, and the tile is redone. For a product below -limit, nothing
// shows it, but its error is at most kError / kFarShare of the row's greatest exponential, if the
// row's greatest logit is not below least_logit.
struct SoftCapPlan {
  // The greatest errors of logits, which are relative errors of probabilities. The rounding of a
  // bfloat16 probability is up to 2e-3, that of a float16 one, with three terms only, up to 2.4e-4.
  static constexpr double kError = 3.5e-4, kFloat16Error = 5e-5, kFarShare = 32;
  SoftCapPolynomial two, three, five;  // terms; a warp uses the fewest that suffice
  float query_factor = 1.0f;

  SoftCapPlan() = default;
  SoftCapPlan(const Options& options, DType operands, bool saturates) {
    const double cap = options.logits_soft_cap;
    int exponent = 0;
    double ratio = std::frexp(options.scale / cap, &exponent);
    // With other exponents, powers of the ratio or of s would leave the range of float32, or Q that
    // of bfloat16. Small Q become denormal, but their lost bits matter only with K of more than
    // 2^100.
    if (!(ratio > 0.0 && exponent > -14 && exponent <= (saturates ? 0 : 14))) return;
    if (saturates) {
      query_factor = static_cast<float>(std::ldexp(1.0, exponent));
    } else {
      ratio = std::ldexp(ratio, exponent);
    }
    const double widest = saturates ? std::fmin(kMostRatio, ratio) : kMostRatio;
    const bool is_short = operands == DType::kBFloat16;
    // The interpolations' greatest errors are up to cap x^5 / 60, cap x^7 / 640, cap x^11 / 57,800.
    if (is_short) {
      const double range = std::pow(60 * kError / cap, 1.0 / 5);
      two = polynomial<2>(cap, ratio, std::fmin(widest, range), saturates);
    }
    const double range = std::pow(640 * (is_short ? kError : kFloat16Error) / cap, 1.0 / 7);
    three = polynomial<3>(cap, ratio, std::fmin(widest, range), saturates);
    if (!saturates) return;
    const double wide = std::pow(57800 * kError / cap, 1.0 / 11);
    five = polynomial<5>(cap, ratio, std::fmin(widest, wide), saturates);
  }

 private:
  // kMostLogit and kLeastLogit bound the greatest logit of a row whose running maximum is 0, the
  // latter as -kLeastLogit. Exponentials then reach 2^58, there may be 2^50 of these, and a row's
  // sum loses no digits. kMostRatio bounds the ratio of logit and cap.
  static constexpr double kMostRatio = 0.9, kMostLogit = 40, kLeastLogit = 14;

  // Returns a polynomial that holds up to the ratio `range` of logit and cap.
  template <int kTerms>
  static SoftCapPolynomial polynomial(double cap, double ratio, double range, bool saturates) {
    SoftCapPolynomial result;
    result.limit = static_cast<float>(range / ratio);
    const double square = double{result.limit} * result.limit;
    if (!saturates) {
      result.offset = static_cast<float>(std::exp2(std::ceil(std::log2(square)) + 1) - square);
    }
    // Interpolates tanh(x) / x at Chebyshev points in u = x^2, in Newton's form: divided
    // differences.
    double u[kTerms], newton[kTerms];
    for (int i = 0; i < kTerms; ++i) {
      u[i] = range * range / 2 * (1 - std::cos((i + 0.5) / kTerms * 3.14159265358979323846));
      newton[i] = std::tanh(std::sqrt(u[i])) / std::sqrt(u[i]);
    }
    for (int order = 1; order < kTerms; ++order) {
      for (int i = kTerms - 1; i >= order; --i) {
        newton[i] = (newton[i] - newton[i - 1]) / (u[i] - u[i - order]);
      }
    }
    // Returns tanh(x), with x^2 saturated.
    const auto approximate = [&](double x) {
      const double v = std::fmin(x * x, ratio * ratio);
      double value = newton[kTerms - 1];
      for (int i = kTerms - 2; i >= 0; --i) value = value * (v - u[i]) + newton[i];
      return x * value;
    };
    // Converts from u = ratio^2 (sum - offset) to powers of the sum.
    const double unit = cap * ratio * 1.4426950408889634, step = ratio * ratio;
    double power[kTerms] = {newton[kTerms - 1]};
    for (int i = kTerms - 2; i >= 0; --i) {
      const double constant = -step * result.offset - u[i];
      for (int j = kTerms - 1; j > 0; --j) power[j] = power[j] * constant + power[j - 1] * step;
      power[0] = power[0] * constant + newton[i];
    }
    for (int i = 0; i < kTerms; ++i) result.factor[i] = static_cast<float>(unit * power[i]);

    if (!saturates) return result;

    // Finds the greatest error of an exponential below -range. Some points give it within a factor
    // of two. The last point stands for all beyond it, whose errors are at most the exponentials.
    const float exact_cap = static_cast<float>(cap);
    float error = 0.0f;
    for (int i = 1; i <= 12; ++i) {
      const double x = range * (1 + 0.02 * i * i);
      const float p = std::exp(-exact_cap * static_cast<float>(approximate(x)));
      const float exact_p = std::exp(-exact_cap * std::tanh(static_cast<float>(x)));
      error = std::fmax(error, i < 12 ? std::fabs(p - exact_p) : std::fmax(p, exact_p));
    }
    const double greatest = std::fmin(cap * std::tanh(range) - 2 * kError, kMostLogit);
    const double least =
        std::log(std::fmax(error * 2 * kFarShare / kError, std::exp(-kLeastLogit)));
    result.greatest_logit = static_cast<float>(greatest);
    result.least_logit = static_cast<float>(least);
    result.greatest_sum = static_cast<float>(std::exp(greatest));
    return result;
  }
};

// Holds what the host derives for these kernels.
struct ModifierPlan {
  // Up to this many keys the soft cap is computed exactly, since polynomials do not make first and
  // last tiles faster.
  static constexpr int32_t kFewKeys = 256;
  SoftCapPlan soft_cap;
  float query_factor = 1.0f;  // a power of two, by which consumers multiply Q
  int8_t batch_shift = 0;     // as in QueryTileCursor

  ModifierPlan() = default;
  ModifierPlan(const Forward& params, bool saturates) {
    if (params.options.logits_soft_cap > 0.0f && params.shape.kv_len > kFewKeys) {
      soft_cap = SoftCapPlan(params.options, params.query.dtype, saturates);
      query_factor = soft_cap.query_factor;
    }
    // Up to four batches that share a bias or mask are processed together: L2 then has to hold that
    // many heads' keys and values at a time.
    const Operand& shared = params.bias ? params.bias : params.mask;
    if (shared && shared.head != 0 && shared.batch[0] == 0 && shared.batch[1] == 0) {
      while (batch_shift < 2 && params.shape.batch % (int64_t{2} << batch_shift) == 0) {
        ++batch_shift;
      }
    }
  }
};

}  // namespace jax_flash::sm90
