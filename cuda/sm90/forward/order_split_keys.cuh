// Combines the outputs of two warpgroups of the sm_90 forward kernel that divide the keys of the
// same rows.
//
// The second warpgroup passes its results to the first through a staging area in shared memory,
// with two named barriers, full and empty. The first rescales both outputs to the greater running
// maximum of each row, and adds them.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/parts.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Stores a warpgroup's results for its part of the keys. Each thread's results are for the thread
// with the same index in the other warpgroup, which has the same rows.
template <typename Smem, int kOutN>
__device__ __forceinline__ void store_partial(const Smem& smem, const OnlineSoftmax<1>& softmax,
                                              const float (&out)[1][kOutN][4], bool has_out) {
  uint32_t at = smem.partial() + threadIdx.x % kWarpgroup * 16;
  const auto store = [&](float x, float y, float z, float w) {
    ptx::st_shared_v4(
        at, uint4{__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)});
    at += kWarpgroup * 16;
  };
  store(softmax.maximum[0][0], softmax.maximum[0][1], softmax.sum[0][0], softmax.sum[0][1]);
#pragma unroll
  for (int n = 0; n < kOutN; ++n) {
    const float (&block)[4] = out[0][n];
    store(has_out ? block[0] : 0.0f, has_out ? block[1] : 0.0f, has_out ? block[2] : 0.0f,
          has_out ? block[3] : 0.0f);
  }
}

template <typename Smem, int kOutN>
__device__ __forceinline__ void add_partial(const Smem& smem, float to_log2,
                                            OnlineSoftmax<1>& softmax, float (&out)[1][kOutN][4]) {
  uint32_t at = smem.partial() + threadIdx.x % kWarpgroup * 16;
  const auto load = [&](float (&values)[4]) {
    const uint4 words = ptx::ld_shared_v4(at);
    values[0] = __uint_as_float(words.x);
    values[1] = __uint_as_float(words.y);
    values[2] = __uint_as_float(words.z);
    values[3] = __uint_as_float(words.w);
    at += kWarpgroup * 16;
  };
  float statistics[4], factor[2], other_factor[2];
  load(statistics);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float& maximum = softmax.maximum[0][half];
    const float other = statistics[half], top = fmaxf(maximum, other);
    const auto factor_of = [&](float value) {
      return value == minus_infinity()
                 ? 0.0f
                 : ptx::ex2_approx_ftz(to_log2_units(value, to_log2) - to_log2_units(top, to_log2));
    };
    factor[half] = factor_of(maximum);
    other_factor[half] = factor_of(other);
    maximum = top;
    softmax.sum[0][half] =
        softmax.sum[0][half] * factor[half] + statistics[2 + half] * other_factor[half];
  }
#pragma unroll
  for (int n = 0; n < kOutN; ++n) {
    float others[4];
    load(others);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      out[0][n][e] = out[0][n][e] * factor[e / 2] + others[e] * other_factor[e / 2];
    }
  }
}

// Hands a warpgroup's results over to the other one. If the staging area was `used`, waits first
// until the other warpgroup has read the previous results.
template <typename Config, typename Consumer>
__device__ __forceinline__ void hand_over_partial(const Consumer& consumer, bool used) {
  if (used) ptx::barrier_sync(kPartialEmpty, Config::kConsumers * kWarpgroup);
  store_partial(consumer.smem, consumer.softmax, consumer.out, consumer.out_started != 0);
  ptx::barrier_arrive(kPartialFull, Config::kConsumers * kWarpgroup);
}
// Waits for the other warpgroup's results and adds them.
template <typename Config, typename Consumer>
__device__ __forceinline__ void take_partial(Consumer& consumer) {
  if constexpr (Config::kKeyGroups > 1) {
    ptx::barrier_sync(kPartialFull, Config::kConsumers * kWarpgroup);
    add_partial(consumer.smem, consumer.to_log2, consumer.softmax, consumer.out);
    ptx::barrier_arrive(kPartialEmpty, Config::kConsumers * kWarpgroup);
  }
}

}  // namespace jax_flash::sm90
