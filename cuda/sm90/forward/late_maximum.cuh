// Raises running maxima late, in kernels that do not compare logits with them before the
// exponentials.
//
// A query tile's first sums predict the following ones. If a running maximum must rise after the
// exponentials, these are rescaled. A tile pays for that only if its sums show that its logits are
// far greater than those before.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Returns whether few of a query tile's first keys make up its rows' sums. Running maxima must then
// follow the greatest logits (TUNING.md, "Errors"). For 128 normally distributed logits, a row's
// sum is 14 on average if their standard deviation is 1, and 4 if it is 2.
template <typename Config>
__device__ __forceinline__ bool sums_look_peaked(const OnlineSoftmax<1>& softmax) {
  constexpr float kLeastSum = 5.5f * Config::kBlockKv / 128, kFixedPoint = 256.0f;
  const float sum = fminf(softmax.sum[0][0] + softmax.sum[0][1], 1024.0f);
  const int32_t sums = __reduce_add_sync(0xffffffff, static_cast<int32_t>(sum * kFixedPoint));
  return sums < static_cast<int32_t>(16 * kLeastSum * kFixedPoint);
}

// Sets `shift`, which is subtracted from logits in log2 units, so that the exponential of a logit
// equal to the running maximum is 2^kLog2. kChecks: sets 0 for a row whose logits were all -inf.
template <bool kChecks, int kLog2>
__device__ __forceinline__ void find_shift(const OnlineSoftmax<1>& softmax, float to_log2,
                                           float (&shift)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float maximum = softmax.maximum[0][half];
    shift[half] = to_log2_units(maximum, to_log2) - kLog2;
    if (kChecks && maximum == minus_infinity()) shift[half] = 0.0f;
  }
}

// Sets the running maxima of all rows of a warp to the greatest of them.
__device__ __forceinline__ void share_maximum(OnlineSoftmax<1>& softmax) {
  float greatest = fmaxf(softmax.maximum[0][0], softmax.maximum[0][1]);
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, distance));
  }
  softmax.maximum[0][0] = softmax.maximum[0][1] = greatest;
}

// If a thread's sum of a row is above this, exponentials are recomputed, since they may be
// infinite. Up to this sum they have lost 7 bits of 24.
inline constexpr float kPeakLimit = 0x1p100f;

// Returns whether exponentials in the sums must be recomputed for this reason.
__device__ __forceinline__ bool sums_too_great(const OnlineSoftmax<1>& softmax) {
  return __any_sync(0xffffffff, fmaxf(softmax.sum[0][0], softmax.sum[0][1]) > kPeakLimit);
}

// Raises running maxima to the rows' greatest logits, which it derives from a tile's exponentials
// (`probabilities`), and rescales these. Sums already include them. Sets `factor`, for the output
// before the tile. kLift: log2 of the exponential of a logit equal to the running maximum.
template <int kLift = 0, int kN>
__device__ __forceinline__ void raise_to_peaks(OnlineSoftmax<1>& softmax,
                                               float (&probabilities)[1][kN][4], float to_log2,
                                               float (&factor)[1][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Four chains: one would wait for its own results.
    constexpr int kChains = 4;
    float chain[kChains] = {};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float (&block)[4] = probabilities[0][n];
      chain[n % kChains] = fmaxf(fmaxf(block[2 * half], block[2 * half + 1]), chain[n % kChains]);
    }
    float greatest = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 1));
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, 2));
    float& maximum = softmax.maximum[0][half];
    const float old = maximum;
    const float raised =
        fmaf(ptx::lg2_approx_ftz(greatest) - kLift, ptx::rcp_approx_ftz(to_log2), maximum);
    maximum = greatest > (1 << kLift) ? raised : maximum;
    const float rise = to_log2_units(old, to_log2) - to_log2_units(maximum, to_log2);
    factor[0][half] = ptx::ex2_approx_ftz(rise);
    softmax.sum[0][half] *= factor[0][half];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      probabilities[0][n][2 * half] *= factor[0][half];
      probabilities[0][n][2 * half + 1] *= factor[0][half];
    }
  }
}

}  // namespace jax_flash::sm90
