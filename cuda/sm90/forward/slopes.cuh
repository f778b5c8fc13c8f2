// Adds ALiBi slopes in the sm_90 forward kernel for causal calls without other modifiers, and
// beside segments (add_slope()). The rest of this comment is about the former.
//
// Let `nearest` be the key nearest to the warp's last row. A slope adds slope * (j - nearest) to
// the logit of key j, plus the addend of `nearest` itself. The latter is the same for all keys of a
// row, and enters lse alone. The former is the same for all rows of a warp. If these share one
// running maximum, too, the addend of a logit depends on its column alone: a thread computes it
// once for both of its rows, which takes half an instruction a score.
//
// In a causal call with a slope that is not negative, as all published ones are, no addend is much
// above 0. The greatest logit of the first keys, without the slope, therefore serves as running
// maximum for all tiles: the sum cannot become much greater than without slopes. It may become too
// small, if logits near the query are far below those of the first keys or the slope is steep. With
// a negative slope, it may overflow. The sum shows both, and launch.cc redoes such rows
// (needs_exact_logits()).
#pragma once

#include <cstdint>

#include "modifiers/distance.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "ptx/math.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kWarpRows = 16;

// Columns are counted from the middle of this many blocks of 8. If they were counted from the
// tile's first column and the slope is steep, the addend of that column would be rounded by far
// more than the addends near the query.
inline constexpr int kSlopeBlocks = 4;
__device__ __forceinline__ constexpr float from_middle(int n, int e) {
  return static_cast<float>(n % kSlopeBlocks * 8 + e % 2 - kSlopeBlocks * 4);
}

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kDistance> : ModifierDefaults<Config, Element, kDistance> {
  using Base = ModifierDefaults<Config, Element, kDistance>;
  using Base::kN;
  using typename Base::Scores;
  static constexpr When kExactMaxima = When::kAlways;
  static constexpr int kOutParts = Config::kOutParts;
  static constexpr bool kDescribedLate = true, kFixedMaxima = true;

  float slope_log2;  // the head's, in log2 units
  int32_t nearest;   // the key nearest to the warp's last row

  // Gives the addend of a logit, which depends on its column.
  struct ColumnAddends {
    static constexpr int kBlocks = kSlopeBlocks;
    float slope_log2, middle[kN / kBlocks];

    __device__ __forceinline__ float operator()(int n, int e) const {
      return fmaf(slope_log2, from_middle(n, e), middle[n / kBlocks]);
    }
  };

  __device__ __forceinline__ ForwardModifier(const Forward&, const ForwardPlan&,
                                             const ForwardSmem<Config>&, int) {}

  __device__ __forceinline__ void describe(const ForwardPlan& plan, const QueryWork& work,
                                           int32_t row0) {
    const DistanceBias& distance = work.modifiers.distance;
    slope_log2 = distance.slope * kLog2E;
    nearest = distance.nearest(row0 + kWarpRows - 1, plan.q_len, plan.kv_len);
  }
  // Products are compared with the running maximum without their addends.
  __device__ __forceinline__ void modify(Scores&, const Forward&, const ModifierOffsets&,
                                         const Band&, int32_t, int32_t, bool, bool) const {}
  __device__ __forceinline__ ColumnAddends addend(int32_t tile, const float (&shift)[2]) const {
    ColumnAddends addends;
    addends.slope_log2 = slope_log2;
    const int32_t col = tile * Config::kBlockKv + fragment_col(0, 0) - nearest;
#pragma unroll
    for (int i = 0; i < kN / ColumnAddends::kBlocks; ++i) {
      const int32_t middle = col + (2 * i + 1) * 4 * ColumnAddends::kBlocks;
      addends.middle[i] = fmaf(slope_log2, static_cast<float>(middle), -shift[0]);
    }
    return addends;
  }
};

// Multiplies products by `scale` and adds the slope's terms, for a kernel with another modifier.
// Both operations on an element depend on its product. Otherwise, the compiler would compute the
// addends of all elements ahead, and such a kernel has no registers for them. `addend` is never
// -inf: a logit that is merely too low must differ from one that is forbidden, so that its row is
// known to need exact logits (least_logit()).
template <int kN>
__device__ __forceinline__ void add_slope(float (&scores)[kN][4], const DistanceBias& distance,
                                          float scale, int32_t row0, int32_t col0) {
  const int32_t base = col0 + fragment_col(0, 0) - row0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t first = sub_sat(base - fragment_row(0, 2 * half), distance.query_offset);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int32_t middle = n / kSlopeBlocks * kSlopeBlocks * 8 + kSlopeBlocks * 4;
      const float term = distance.slope * (static_cast<float>(first) + middle);
      const float addend = ptx::max_nan(term, kLowLse);
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        const float scaled = fmaf(scores[n][e], scale, addend);
        scores[n][e] = fmaf(distance.slope, from_middle(n, e), scaled);
      }
    }
  }
}

template <>
struct RowStatistics<kDistance> {
  static __device__ __forceinline__ void finish(const ForwardPlan& plan, const QueryWork& work,
                                                int half, int32_t row,
                                                const OnlineSoftmax<1>& softmax, float& lse,
                                                float& normalizer) {
    const DistanceBias& distance = work.modifiers.distance;
    const int32_t last = row / kWarpRows * kWarpRows + kWarpRows - 1;
    const int32_t nearest = distance.nearest(last, plan.q_len, plan.kv_len);
    const bool has_keys = work.band.first_col(row) < work.band.end_col(row);
    const int32_t between = sub_sat(nearest - row, distance.query_offset);
    const float rest = has_keys ? distance.slope * static_cast<float>(between) : 0.0f;
    softmax.finish(0, half, plan.to_log2, work.sink_log2 - rest * kLog2E, lse, normalizer);
    lse += rest;
    float total = softmax.sum[0][half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const bool exact = total >= 0x1p-60f && total <= kPeakLimit;  // false for NaN
    // If the sink is the greatest term, `rest` has been subtracted from it and added again.
    const bool cancels = work.sink_log2 > minus_infinity() && fabsf(rest) > kExtremeLse;
    if (has_keys && (!exact || cancels)) lse = __int_as_float(0x7fffffff);
  }
};

}  // namespace jax_flash::sm90
