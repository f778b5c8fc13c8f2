// Operates on the scores of a warpgroup's tile in registers, in the FP8 forward kernel: applies
// segments and a soft cap, finds the greatest logits, computes exponentials and their sums, and
// rounds P to an operand.
#pragma once

#include <cstdint>

#include "ptx/float8.cuh"
#include "ptx/math.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// A bound of a thread's sum of P in a row of a tile. Up to it, no P is above e4m3's greatest
// number.
inline constexpr float kFloat8SumLimit = 448.0f;
// Above this sum, some P may be infinite, and a tile's scores are computed again.
inline constexpr float kFloat8RedoLimit = 0x1p100f;
// log2 of P of a row's greatest logit: in the row's first tile, and after a tile's scores were
// computed again. A thread has 32 of a row's keys, so that its sum is at most 256. P below 2^-6
// loses bits.
inline constexpr int kFirstPeakLog2 = 3, kRedonePeakLog2 = 3;
// log2 of a bound of a thread's sum after P was lowered.
inline constexpr int kLoweredLog2 = 6;

using Float8Scores = float[16][4];

// Replaces scores by P = 2^(factor s + addend), and sets `total` to a thread's sums in its two
// rows. Each sum has two chains of additions.
__device__ __forceinline__ void float8_exponentials(Float8Scores& scores, float factor,
                                                    const float (&addend)[2], float (&total)[2]) {
  float sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = ptx::ex2_approx_ftz(fmaf(scores[n][e], factor, addend[e / 2]));
      sums[e / 2][e % 2] += scores[n][e];
    }
  }
  total[0] = sums[0][0] + sums[0][1];
  total[1] = sums[1][0] + sums[1][1];
}

// Rounds P to e4m3, as fragments of 32 keys.
__device__ __forceinline__ void float8_weights(const Float8Scores& p, uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2 * 2, n = 4 * k + i / 2 * 2;
      weights[k][i] =
          ptx::cvt_rn_e4m3x4(p[n][row], p[n][row + 1], p[n + 1][row], p[n + 1][row + 1]);
    }
  }
}

// Returns the greatest logits of a thread's two rows, among the four threads that share them.
__device__ __forceinline__ void greatest_logits(const Float8Scores& logits, float (&greatest)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float chain[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      chain[n % 2] = fmaxf(chain[n % 2], fmaxf(logits[n][2 * half], logits[n][2 * half + 1]));
    }
    float& all = greatest[half];
    all = fmaxf(chain[0], chain[1]);
    all = fmaxf(all, __shfl_xor_sync(0xffffffff, all, 1));
    all = fmaxf(all, __shfl_xor_sync(0xffffffff, all, 2));
  }
}

// Multiplies products by `factor`, which makes them logits in log2 units.
__device__ __forceinline__ void scale_products(Float8Scores& scores, float factor) {
#pragma unroll
  for (auto& block : scores) {
#pragma unroll
    for (float& x : block) x *= factor;
  }
}

// Caps logits in log2 units: cap tanh(x / cap).
__device__ __forceinline__ void cap_logits(Float8Scores& logits, float cap) {
  const float twice = 2.0f * kLog2E * ptx::rcp_approx_ftz(cap);
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float power = ptx::ex2_approx_ftz(logits[n][e] * twice);
      logits[n][e] = fmaf(-2.0f * cap, ptx::rcp_approx_ftz(power + 1.0f), cap);
    }
  }
}

// Sets logits to -inf for keys whose segment is not the row's. key_ids points to the id of the
// tile's first key.
__device__ __forceinline__ void forbid_other_segments(Float8Scores& logits, const int32_t* key_ids,
                                                      const int32_t (&row_ids)[2]) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const int2 ids = *reinterpret_cast<const int2*>(key_ids + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int32_t id = e % 2 == 0 ? ids.x : ids.y;
      logits[n][e] = id == row_ids[e / 2] ? logits[n][e] : minus_infinity();
    }
  }
}

}  // namespace jax_flash::sm90
