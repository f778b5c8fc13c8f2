// Keeps the rows' greatest logits so far as running maxima, for kernels that compare a tile's
// logits with these before the exponentials in any case.
//
// A row's greatest P is then exactly 1. P is rounded to the operands' type. If few keys make up a
// row's sum, most of the output's error is that of the greatest P, unless this is 1 (TUNING.md,
// "Errors").
//
// Floats that are not negative compare like integers, and the hardware compares three integers in
// one instruction. This halves the instructions, which compete with the products. As
// integers, negative floats are less than these, too, but among themselves they compare in the
// wrong order. While a row's greatest logit is below 0, logits are therefore compared as floats.
// Running maxima only rise, so one is seldom below 0 after some keys.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Finds, for a thread's two rows, the greatest of the running maximum and a tile's logits. A thread
// has a quarter of a row's logits. Two chains are used, since one would wait for its own results.
// With kByBits, running maxima must not be below 0.
template <bool kByBits, int kN>
__device__ __forceinline__ void find_greatest(const float (&logits)[1][kN][4],
                                              const OnlineSoftmax<1>& softmax,
                                              float (&greatest)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float maximum = softmax.maximum[0][half];
    if constexpr (kByBits) {
      int32_t chain[2] = {__float_as_int(maximum), __float_as_int(maximum)};
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float (&block)[4] = logits[0][n];
        chain[n % 2] = __vimax3_s32(__float_as_int(block[2 * half]),
                                    __float_as_int(block[2 * half + 1]), chain[n % 2]);
      }
      int32_t bits = max(chain[0], chain[1]);
      bits = max(bits, __shfl_xor_sync(0xffffffff, bits, 1));
      greatest[half] = __int_as_float(max(bits, __shfl_xor_sync(0xffffffff, bits, 2)));
    } else {
      float chain[2] = {maximum, maximum};
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float (&block)[4] = logits[0][n];
        chain[n % 2] = fmaxf(chain[n % 2], fmaxf(block[2 * half], block[2 * half + 1]));
      }
      float value = fmaxf(chain[0], chain[1]);
      value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
      greatest[half] = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
    }
  }
}

// Returns whether none of the warp's running maxima is below 0. If so, this stays true.
__device__ __forceinline__ bool none_below_zero(const OnlineSoftmax<1>& softmax) {
  const int32_t least =
      min(__float_as_int(softmax.maximum[0][0]), __float_as_int(softmax.maximum[0][1]));
  return __reduce_min_sync(0xffffffff, least) >= 0;
}

// Raises running maxima to the rows' greatest logits; returns whether some row of the warp has a
// greater one, so that its output so far must be multiplied by `factor`. kByDifference: for
// exponentials_of_differences(). A greatest logit below `least` counts as -inf.
template <bool kByBits, bool kByDifference, int kN>
__device__ __forceinline__ bool raise_maxima(OnlineSoftmax<1>& softmax,
                                             const float (&logits)[1][kN][4], float to_log2,
                                             float (&factor)[1][2],
                                             float least = minus_infinity()) {
  float greatest[2];
  find_greatest<kByBits>(logits, softmax, greatest);
  if constexpr (!kByBits) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      greatest[half] = softmax.limit(0, half, greatest[half], least);
    }
  }
  float (&maximum)[2] = softmax.maximum[0];
  if (!__any_sync(0xffffffff, greatest[0] > maximum[0] || greatest[1] > maximum[1])) {
    return false;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float old = maximum[half];
    const float rise = kByDifference
                           ? (old - greatest[half]) * to_log2
                           : to_log2_units(old, to_log2) - to_log2_units(greatest[half], to_log2);
    factor[0][half] = old == greatest[half] ? 1.0f : ptx::ex2_approx_ftz(rise);
    maximum[half] = greatest[half];
    softmax.sum[0][half] *= factor[0][half];
  }
  return true;
}

// Does the same as raise_maxima(), by bits if `by_bits`. It must be false for new running
// maxima, and becomes true once none is below 0.
template <bool kByDifference, int kN>
__device__ __forceinline__ bool raise_to_greatest(OnlineSoftmax<1>& softmax, bool& by_bits,
                                                  const float (&logits)[1][kN][4], float to_log2,
                                                  float (&factor)[1][2],
                                                  float least = minus_infinity()) {
  if (by_bits) return raise_maxima<true, kByDifference>(softmax, logits, to_log2, factor);
  const bool rises = raise_maxima<false, kByDifference>(softmax, logits, to_log2, factor, least);
  by_bits = none_below_zero(softmax);
  return rises;
}

// Does what OnlineSoftmax::exponentials() does, but subtracts the running maximum before the factor
// to_log2. In log2 units the running maximum is rounded, and with logits of 6,000 a row's greatest
// P would be up to 2^-11.5 off 1. This takes one more instruction.
__device__ __forceinline__ void exponentials_of_differences(OnlineSoftmax<1>& softmax,
                                                            float (&block)[4], float to_log2) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float maximum = softmax.maximum[0][e / 2];
    block[e] -= maximum == minus_infinity() ? 0.0f : maximum;
    block[e] = ptx::ex2_approx_ftz(block[e] * to_log2);
    softmax.sum[0][e / 2] += block[e];
  }
}

}  // namespace jax_flash::sm90
