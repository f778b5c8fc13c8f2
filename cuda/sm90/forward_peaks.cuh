// References that rise to a row's peak after the exponentials, which are multiplied then: what a
// tile costs whose sums show that its logits are far greater than those before.
//
// Above head dim 128 also where a row's greatest probability is to be exactly 1: P is rounded to
// the operands' type, and where few keys make up a row, most of the output's error is that of its
// greatest P, unless this is 1. A reference that is the row's greatest logit does that, but to look
// for it in every tile, and to rescale the output for each new one, takes too long. The first tile
// has an exact one; later on a greater logit counts if its probability is a large part of the row's
// sum, which a thread sees by the sums of its own columns.
#pragma once

#include "ptx/math.cuh"
#include "sm90/config.cuh"
#include "tile/band.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Of a row's sum over keys: the first tile's, later ones'. Smaller ones have less error, but have
// tiles looked at whose probabilities differ little (TUNING.md, "Errors").
inline constexpr float kFirstPeakShare = 1.0f, kPeakShare = 0.3f;
// Of a thread's sum in a row, above which exponentials are computed anew: they may be infinite. Up
// to that they have lost 7 bits of 24.
inline constexpr float kPeakLimit = 0x1p100f;

// The shares of a thread's rows where an edge cuts off a part of their first tile of keys: as if it
// had all, or none if there are too few to tell. Of a warp's rows from row0 on.
template <int kBlockKv>
__device__ __forceinline__ void first_peak_shares(const Band& band, int32_t row0, int32_t tile,
                                                  float (&share)[2]) {
  const int32_t col0 = tile * kBlockKv;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half);
    const int32_t keys = min(band.end_col(row), col0 + kBlockKv) - max(band.first_col(row), col0);
    share[half] = keys < kBlockKv / 4 ? kOptimisticLimit
                                      : kFirstPeakShare * kBlockKv * ptx::rcp_approx_ftz(keys);
  }
}

// As OnlineSoftmax::exponentials(), but of differences to the reference: in log2 units that is
// rounded, and with logits of 6,000 a row's greatest P is up to 2^-11.5 off 1 for it. An
// instruction more.
__device__ __forceinline__ void peak_exponentials(OnlineSoftmax<1>& softmax, float (&block)[4],
                                                  float to_log2) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float reference = softmax.reference[0][e / 2];
    block[e] -= reference == minus_infinity() ? 0.0f : reference;
    block[e] = ptx::ex2_approx_ftz(block[e] * to_log2);
    softmax.sum[0][e / 2] += block[e];
  }
}

// Whether exponentials that sums include have to be computed anew for that.
__device__ __forceinline__ bool sums_too_great(const OnlineSoftmax<1>& softmax) {
  return __any_sync(0xffffffff, fmaxf(softmax.sum[0][0], softmax.sum[0][1]) > kPeakLimit);
}

// Of a thread's sums of a tile, in each of its rows, above which there may be a new peak.
struct PeakLimits {
  float of_row[2];  // negative while a row has had nothing but -inf

  __device__ __forceinline__ void set(const OnlineSoftmax<1>& softmax, const float (&share)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.sum[0][half];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      const float limit = fminf(fmaxf(share[half] * total, 1.0f), kOptimisticLimit);
      of_row[half] = softmax.reference[0][half] == minus_infinity() ? -1.0f : limit;
    }
  }
  __device__ __forceinline__ void set(const OnlineSoftmax<1>& softmax) {
    set(softmax, {kPeakShare, kPeakShare});
  }
  __device__ __forceinline__ bool exceeded_by(const float (&sum)[2]) const {
    return sum[0] > of_row[0] || sum[1] > of_row[1];
  }
  // Whether some row of the warp has had nothing but -inf.
  __device__ __forceinline__ bool missing() const {
    return __any_sync(0xffffffff, fminf(of_row[0], of_row[1]) < 0.0f);
  }
  // Where all logits of a tile are compared: how far above the reference a peak is at least.
  __device__ __forceinline__ float slack(int half) const {
    return ptx::lg2_approx_ftz(fmaxf(0.5f * of_row[half], 1.0f));
  }
};

// Raises references to the rows' greatest logits, for probabilities of the last tile in place of
// logits, which sums include. `factor`: for the output before it. kByDifference: as
// peak_exponentials() has them.
template <bool kByDifference, int kN>
__device__ __forceinline__ void raise_to_peaks(OnlineSoftmax<1>& softmax,
                                               float (&probabilities)[1][kN][4], float to_log2,
                                               float (&factor)[1][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // In four chains: one would wait for its own results.
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
    float& reference = softmax.reference[0][half];
    const float old = reference;
    const float raised =
        fmaf(ptx::lg2_approx_ftz(greatest), ptx::rcp_approx_ftz(to_log2), reference);
    reference = greatest > 1.0f ? raised : reference;
    const float rise = kByDifference
                           ? (old - reference) * to_log2
                           : to_log2_units(old, to_log2) - to_log2_units(reference, to_log2);
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
