// Computes the online softmax over tiles of logits in mma accumulator fragments (Milakov and
// Gimelshein, arXiv:1805.02867; FlashAttention-2, arXiv:2307.08691).
//
// A row's exponentials are relative to its running maximum. This may be less than the row's
// greatest logit so far, by a slack of up to kSlack (log2 units). A rise of the running maximum
// rescales the output accumulators, one multiplication each; with the slack, usually only the first
// tiles raise it. float32 and the operand types can hold 2^kSlack. Kernels for few queries have no
// slack. In the code, `maximum` is the running maximum.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"

// Switch of the ablation (sm80/config.cuh): 0 rescales at every rise of a maximum.
#ifndef JAX_FLASH_SM80_RESCALE_SLACK
#define JAX_FLASH_SM80_RESCALE_SLACK 8.0f
#endif

namespace jax_flash {

inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < -minus_infinity(); }

// Converts a running maximum to log2 units, rounded. Rescaling factors must be computed from the
// same rounded number that is subtracted from logits. Otherwise, large logits would have a
// different error with each running maximum, and these errors do not cancel when exponentials are
// divided by their sum: 2^-11 at logits of 6,000. The product must not be fused into an FMA, which
// would not round it.
__device__ __forceinline__ float to_log2_units(float maximum, float to_log2) {
  return __fmul_rn(maximum, to_log2);
}

// Returns the factor of a row's output: the reciprocal of `total` times `factor`, the exponential
// of the row's running maximum relative to a greater sink. If the sink is so much greater that this
// underflows, it is the least positive number instead of 0, which would hide Inf and NaN in a
// value.
__device__ __forceinline__ float normalizer_of(float factor, float total) {
  return ptx::max_nan(factor * ptx::rcp_approx_ftz(total), 0x1p-149f);
}

// Adds `factor` times four columns of a part's output to those of the row.
__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& part) {
  sum.x += factor * part.x;
  sum.y += factor * part.y;
  sum.z += factor * part.z;
  sum.w += factor * part.w;
}

// Holds the statistics of this thread's rows: [m][half] is row g + 8 half of the m-th 16 rows of
// its warp. kByDifference: the running maximum is subtracted from a logit before the multiplication
// by to_log2, and not after it. This takes one more instruction, and is exact for any finite
// logits.
template <int kM, bool kByDifference = false>
struct OnlineSoftmax {
  static constexpr float kSlack = JAX_FLASH_SM80_RESCALE_SLACK;

  float maximum[kM][2];  // the running maximum, in the units of the logits
  float sum[kM][2];      // sum of this thread's own columns
  float lift = 0.0f;     // log2 of the exponential of a logit that equals the running maximum
  bool low[kM][2] = {};  // a greatest logit was finite, but treated as -inf: limit()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      maximum[m][0] = maximum[m][1] = minus_infinity();
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  // Compares a tile's logits with the running maxima. If a greatest logit exceeds its running
  // maximum by more than `all_slack` (log2 units), raises the maxima and multiplies `out`,
  // accumulated so far, by 2^(to_log2 (old - new running maximum)).
  template <int kN, int kOutN>
  __device__ __forceinline__ void update_maximum(const float (&logits)[kM][kN][4], float to_log2,
                                                 float (&out)[kM][kOutN][4],
                                                 float all_slack = kSlack) {
    float greatest[kM][2], slack[kM][2];
    fill_slack(slack, all_slack);
    if (!find_rises<1>(logits, to_log2, slack, greatest)) return;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = raise(m, half, greatest[m][half], to_log2);
#pragma unroll
        for (int n = 0; n < kOutN; ++n) {
          out[m][n][2 * half] *= factor;
          out[m][n][2 * half + 1] *= factor;
        }
      }
    }
  }

  // Does the same without the multiplication: returns true, uniformly in the warp, if `out` is to
  // be rescaled, and sets the factors. The search runs in kChains independent chains, because a
  // single chain would wait for its own results. `slack`: of each row. A greatest logit below
  // `least` counts as -inf.
  template <int kChains, int kN>
  __device__ __forceinline__ bool raise_maximum(const float (&logits)[kM][kN][4], float to_log2,
                                                const float (&slack)[kM][2], float (&factor)[kM][2],
                                                float least = minus_infinity()) {
    float greatest[kM][2];
    if (!find_rises<kChains>(logits, to_log2, slack, greatest, least)) return false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      factor[m][0] = raise(m, 0, greatest[m][0], to_log2);
      factor[m][1] = raise(m, 1, greatest[m][1], to_log2);
    }
    return true;
  }

  template <int kChains, int kN>
  __device__ __forceinline__ bool raise_maximum(const float (&logits)[kM][kN][4], float to_log2,
                                                float (&factor)[kM][2]) {
    float slack[kM][2];
    fill_slack(slack);
    return raise_maximum<kChains>(logits, to_log2, slack, factor);
  }

  // Returns a row's greatest logit, or -inf if it is below `least`.
  __device__ __forceinline__ float limit(int m, int half, float greatest, float least) {
    if (!(greatest < least)) return greatest;
    low[m][half] |= greatest != minus_infinity();
    return minus_infinity();
  }

  // True if every row of the warp has a running maximum.
  __device__ __forceinline__ bool ready() const {
    bool all = true;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      all = all && maximum[m][0] != minus_infinity() && maximum[m][1] != minus_infinity();
    }
    return __all_sync(0xffffffff, all);
  }

  // Raises a row's running maximum. Returns the factor for values that were computed with the old
  // one.
  __device__ __forceinline__ float raise(int m, int half, float greatest, float to_log2) {
    const float old = maximum[m][half];
    const float raised = fmaxf(old, greatest);
    const float rise = kByDifference ? (old - raised) * to_log2
                                     : to_log2_units(old, to_log2) - to_log2_units(raised, to_log2);
    const float factor = old == raised ? 1.0f : ptx::ex2_approx_ftz(rise);
    maximum[m][half] = raised;
    sum[m][half] *= factor;
    return factor;
  }

  template <int kOutN>
  static __device__ __forceinline__ void rescale(float (&out)[kM][kOutN][4],
                                                 const float (&factor)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[m][e / 2];
      }
    }
  }

  // Replaces the logits of a block of the m-th rows by 2^(to_log2 (logit - running maximum)), and
  // adds these to the thread's sums. -inf gives 0.
  __device__ __forceinline__ void exponentials(float (&block)[4], int m, float to_log2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kByDifference) {
        const float value = maximum[m][e / 2];
        block[e] -= value == minus_infinity() ? 0.0f : value;
        block[e] = ptx::ex2_approx_ftz(block[e] * to_log2);
      } else {
        block[e] = ptx::ex2_approx_ftz(fmaf(block[e], to_log2, -shift_log2(m, e / 2, to_log2)));
      }
      sum[m][e / 2] += block[e];
    }
  }

  // Finishes a row after the last tile: sets its natural log-sum-exp, and the factor of its output.
  // `sink_log2`: the sink logit in log2 units, or -inf. kExact: the logarithm is rounded only once.
  template <bool kExact = false>
  __device__ __forceinline__ void finish(int m, int half, float to_log2, float sink_log2,
                                         float& lse, float& normalizer) const {
    float total = sum[m][half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const bool nothing_allowed = total == 0.0f;
    static_assert(!kByDifference);
    const float shift = maximum[m][half] == minus_infinity()
                            ? 0.0f
                            : to_log2_units(maximum[m][half], to_log2) - lift;
    const float top = fmaxf(shift, sink_log2);
    const float factor = ptx::ex2_approx_ftz(shift - top);
    total = fmaf(total, factor, ptx::ex2_approx_ftz(sink_log2 - top));
    lse = (nothing_allowed ? sink_log2 : top + log2_of<kExact>(total)) * kLn2;
    normalizer = nothing_allowed ? 0.0f : normalizer_of(factor, total);
  }

  // Does the same if kByDifference, for logits and a sink in units that to_log2 converts; lse and
  // lse_low are in natural units.
  template <bool kExact = false>
  __device__ __forceinline__ void finish(int m, int half, float to_log2, float sink, float& lse,
                                         float& lse_low, float& normalizer) const {
    static_assert(kByDifference);
    float total = sum[m][half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    finish_row<kExact>(maximum[m][half], total, to_log2, sink, lse, lse_low, normalizer);
  }
  // Does the same for a row with the running maximum `value` and the sum `total`.
  template <bool kExact = false>
  static __device__ __forceinline__ void finish_row(float value, float total, float to_log2,
                                                    float sink, float& lse, float& lse_low,
                                                    float& normalizer) {
    const bool nothing_allowed = total == 0.0f;
    const float top = fmaxf(value, sink);
    const float factor = nothing_allowed ? 0.0f : ptx::ex2_approx_ftz((value - top) * to_log2);
    if (sink != minus_infinity()) {
      total = fmaf(total, factor, ptx::ex2_approx_ftz((sink - top) * to_log2));
    }
    const float greatest = to_log2 == kLog2E ? top : top * kLn2;
    const float rest = kExact ? logf(total) : ptx::lg2_approx_ftz(total) * kLn2;
    lse = greatest + rest;
    const float taken = lse - greatest;  // Knuth's sum of two; lse_low is the lost part
    lse_low = (greatest - (lse - taken)) + (rest - taken);
    normalizer = nothing_allowed ? 0.0f : normalizer_of(factor, total);
    if (nothing_allowed && top == minus_infinity()) {  // logits of NaN have such a top, too
      lse = minus_infinity();
      lse_low = normalizer = 0.0f;
    }
  }

 private:
  template <bool kExact>
  static __device__ __forceinline__ float log2_of(float total) {
    return kExact ? log2f(total) : ptx::lg2_approx_ftz(total);
  }
  static __device__ __forceinline__ void fill_slack(float (&slack)[kM][2], float value = kSlack) {
#pragma unroll
    for (int m = 0; m < kM; ++m) slack[m][0] = slack[m][1] = value;
  }

  // True if some row's greatest logit is far above its running maximum.
  template <int kChains, int kN>
  __device__ __forceinline__ bool find_rises(const float (&logits)[kM][kN][4], float to_log2,
                                             const float (&slack)[kM][2], float (&greatest)[kM][2],
                                             float least = minus_infinity()) {
    bool rises = false;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float chain[kChains];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float pair = fmaxf(logits[m][n][2 * half], logits[m][n][2 * half + 1]);
          chain[n % kChains] = n < kChains ? pair : fmaxf(chain[n % kChains], pair);
        }
        float value = chain[0];
#pragma unroll
        for (int n = 1; n < kChains; ++n) value = fmaxf(value, chain[n]);
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
        value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
        value = limit(m, half, value, least);
        greatest[m][half] = value;
        rises |= (value - maximum[m][half]) * to_log2 > slack[m][half];
      }
    }
    return __any_sync(0xffffffff, rises);
  }

  // Returns the running maximum in log2 units, or 0 for a row whose logits were all -inf.
  __device__ __forceinline__ float shift_log2(int m, int half, float to_log2) const {
    const float value = maximum[m][half];
    return value == minus_infinity() ? 0.0f : value * to_log2;
  }
};

}  // namespace jax_flash
