// Applies a single modifier in the sm_90 forward kernels made for it: soft cap, mask, segments or
// bias. The kernel for several modifiers uses modify_scores() of modifiers/scores.cuh.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "modifiers/pairs.cuh"
#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/mask_matrices.h"
#include "plan/mask_words.h"
#include "plan/tensor_map.h"
#include "ptx/math.cuh"
#include "tile/band.cuh"
#include "tile/matmul.cuh"

namespace jax_flash::sm90 {

// Approximates the soft cap of a product s as s P(s^2), with scale and cap in the coefficients.
struct SoftCapPolynomial {
  static constexpr int kMostTerms = 5;
  float factor[kMostTerms] = {};  // coefficients, to logits in log2 units
  float limit = -1.0f;  // bound of |s| up to which it holds; negative: it must not be used
  // If it saturates: the bounds that a row's greatest logit so far must meet for products to be
  // used as they come, and the sum of exponentials, relative to 0, that shows a product beyond the
  // limit.
  float least_logit = 0.0f, greatest_logit = -1.0f, greatest_sum = 0.0f;
  // Otherwise: added to s^2. Up to the limit the sum has the offset's exponent, and beyond it a
  // greater one, and so a bit that the offset's exponent lacks, which `or` keeps.
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
// ratio of logit and cap in [0.5, 1), and s^2 is saturated there, which costs nothing. So products
// of any size have some exponential. Beyond the limit it is greater than at the limit, which a sum
// shows, so that the tile is redone. Below -limit, where nothing shows it, its error is at most
// kError / kFarShare of the row's greatest exponential, if the row's greatest logit is not below
// least_logit.
struct SoftCapPlan {
  // The greatest errors of logits, which are relative errors of probabilities. The rounding of a
  // bfloat16 probability is up to 2e-3, that of a float16 one, with three terms only, up to 2.4e-4.
  static constexpr double kError = 3.5e-4, kFloat16Error = 5e-5, kFarShare = 32;
  SoftCapPolynomial two, three, five;  // terms; no more than the products of a warp need
  float query_factor = 1.0f;

  SoftCapPlan() = default;
  SoftCapPlan(const Options& options, DType operands, bool saturates) {
    const double cap = options.logits_soft_cap;
    int exponent = 0;
    double ratio = std::frexp(options.scale / cap, &exponent);
    // Otherwise powers of the ratio or of s would leave the range of float32, or Q that of
    // bfloat16. Small Q become denormal, but what they lose matters only with K of more than 2^100.
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
  // For logits of rows whose running maxima are 0, from -kLeastLogit on: exponentials reach 2^58,
  // there may be 2^50 of these, and a row's sum loses no digits.
  static constexpr double kMostRatio = 0.9, kMostLogit = 40, kLeastLogit = 14;

  // Holds up to the ratio `range` of logit and cap.
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

    // Finds the greatest error of an exponential below -range at some points, which gives it within
    // a factor of two. The last point stands for all beyond it, where errors are at most the
    // exponentials.
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

// Computes exponentials of a block of products under the soft cap, relative to shift[] of the rows,
// and adds them to sum[]. `seen`, unless squares are saturated: collects the bits of all squares
// and offsets so far, also of NaN.
template <int kTerms, bool kSaturates>
__device__ __forceinline__ void soft_cap_exponentials(float (&block)[4],
                                                      const SoftCapPolynomial& cap,
                                                      const float (&shift)[2], float (&sum)[2],
                                                      uint32_t& seen) {
  float square[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    square[e] =
        kSaturates ? ptx::mul_sat(block[e], block[e]) : fmaf(block[e], block[e], cap.offset);
    const float polynomial = cap.template value<kTerms>(square[e]);
    block[e] = ptx::ex2_approx_ftz(fmaf(block[e], polynomial, -shift[e / 2]));
    sum[e / 2] += block[e];
  }
  if constexpr (!kSaturates) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {  // two in one instruction
      seen |= __float_as_uint(square[e]) | __float_as_uint(square[e + 1]);
    }
  }
}
// Does the same with squares saturated, relative to 0.
template <int kTerms>
__device__ __forceinline__ void soft_cap_exponentials(float (&block)[4],
                                                      const SoftCapPolynomial& cap,
                                                      float (&sum)[2]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float polynomial = cap.template value<kTerms>(ptx::mul_sat(block[e], block[e]));
    block[e] = ptx::ex2_approx_ftz(block[e] * polynomial);
    sum[e / 2] += block[e];
  }
}
// Returns whether some square was beyond the limit.
__device__ __forceinline__ bool exceeds(uint32_t seen, float offset) {
  return (seen & ~__float_as_uint(offset) & 0x7f800000) != 0;
}

// Returns the greatest magnitude in a warp's tile, ignoring NaN.
template <int kN>
__device__ __forceinline__ float greatest_magnitude(const float (&scores)[1][kN][4]) {
  constexpr int kChains = 4;
  float chain[kChains] = {};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) chain[e] = fmaxf(chain[e], fabsf(scores[0][n][e]));
  }
  const float value = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
  // Magnitudes are not negative, so their bits have the same order; the result is in a uniform
  // register.
  return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
}

// Holds which elements a thread's rows may attend to: for row `half`, bit 2 n + e is column
// fragment_col(n, e).
struct AllowedBits {
  uint32_t row[2];
};
template <int kN>
inline constexpr uint32_t kAllBits = kN == 16 ? ~0u : (1u << 2 * kN) - 1;

// Loads them from a mask's words (plan/mask_words.h), with `row_stride` pairs from 64 rows to the
// next.
template <int kBlockKv>
__device__ __forceinline__ bool is_allowed(const uint2* pairs, int64_t row_stride, int32_t row,
                                           int32_t col) {
  const int32_t in_group = row % MaskWords::kRows, in_tile = col % kBlockKv;
  const int32_t thread = in_group / 16 * 32 + in_group % 8 * 4 + in_tile % 8 / 2;
  const uint2 pair =
      pairs[row / MaskWords::kRows * row_stride + col / kBlockKv * MaskWords::kThreads + thread];
  const uint32_t bits = in_group % 16 < 8 ? pair.x : pair.y;
  return bits >> (in_tile / 8 * 2 + in_tile % 2) & 1;
}

// Returns the bits of columns below `end`, counted from the thread's first.
__device__ __forceinline__ uint32_t bits_below(int32_t end) {
  const int32_t count = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// Clears what the band does not allow, and rows that do not exist.
__device__ __forceinline__ void forbid_edges(AllowedBits& allowed, const Band& band, int32_t row0,
                                             int32_t col0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half), base = col0 + fragment_col(0, 0);
    const uint32_t bits =
        bits_below(band.end_col(row) - base) & ~bits_below(band.first_col(row) - base);
    allowed.row[half] &= row < band.q_len ? bits : 0;
  }
}

// Returns a bit per column of this thread, set if its warp attends to it.
template <int kN>
__device__ __forceinline__ uint32_t attended_by_warp(const AllowedBits& allowed) {
  uint32_t bits = allowed.row[0] | allowed.row[1];
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  return bits;
}

// Sets forbidden elements of kBlocks blocks from n on to -inf, the bits of one row after those of
// the other: R2P makes predicates of them.
template <int kBlocks, int kN>
__device__ __forceinline__ void forbid(float (&scores)[kN][4], const AllowedBits& allowed, int n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      if (n + i / 2 >= kN) continue;
      float& score = scores[n + i / 2][2 * half + i % 2];
      if (!(allowed.row[half] >> (2 * n + i) & 1)) score = minus_infinity();
    }
  }
}
// Does the same by additions, which take half as long as selections. A forbidden NaN or infinity
// becomes NaN.
template <int kBlocks, int kN>
__device__ __forceinline__ void forbid_finite(float (&scores)[kN][4], const AllowedBits& allowed,
                                              int n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      if (n + i / 2 >= kN) continue;
      asm("{ .reg .pred p; setp.eq.u32 p, %1, 0; @p add.f32 %0, %0, %2; }"
          : "+f"(scores[n + i / 2][2 * half + i % 2])
          : "r"(allowed.row[half] & 1u << (2 * n + i)), "f"(minus_infinity()));
    }
  }
}

// Returns whether `row` may attend to `col`, which is below kv_len.
template <typename Config, uint32_t kModifiers>
__device__ __forceinline__ bool allows_element(const Forward& params,
                                               const ModifierOffsets& offsets, const Band& band,
                                               int32_t row, int32_t col) {
  if (row >= band.q_len || col < band.first_col(row) || col >= band.end_col(row)) return false;
  if constexpr (kModifiers == kMask) {
    const Operand& mask = params.mask;
    if constexpr (Config::kMaskWords) {
      return is_allowed<Config::kBlockKv>(static_cast<const uint2*>(mask.data) + offsets.mask,
                                          mask.row, row, col);
    }
    return static_cast<const uint8_t*>(mask.data)[offsets.mask + row * mask.row + col * mask.col] !=
           0;
  } else {
    const Operand &queries = params.query_segment_ids, &keys = params.key_value_segment_ids;
    return static_cast<const int32_t*>(queries.data)[offsets.query_ids + row * queries.row] ==
           static_cast<const int32_t*>(keys.data)[offsets.key_ids + col * keys.row];
  }
}

// Holds what the host derives for these kernels.
struct ModifierPlan {
  // Up to this many keys the soft cap is exact: a plan does not make first and last tiles faster.
  static constexpr int32_t kFewKeys = 256;
  SoftCapPlan soft_cap;
  float query_factor = 1.0f;  // a power of two, by which consumers multiply Q
  bool vectors = false;       // true if the bias can be read ahead: in vectors, or boxes
  int8_t batch_shift = 0;     // that of QueryTileCursor

  ModifierPlan() = default;
  ModifierPlan(const Forward& params, bool saturates) {
    if (params.options.logits_soft_cap > 0.0f && params.shape.kv_len > kFewKeys) {
      soft_cap = SoftCapPlan(params.options, params.query.dtype, saturates);
      query_factor = soft_cap.query_factor;
    }
    if (params.bias) {
      const int bytes = params.bias.dtype == DType::kFloat32 ? 4 : 2;
      vectors = has_vectors(params.bias, bytes, 16) &&
                (bytes == 4 ? params.shape.kv_len % 4 == 0
                            : params.bias.dtype == params.query.dtype &&
                                  fits_tensor_map(params.shape, params.bias, 1));
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
