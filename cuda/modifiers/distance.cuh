// Adds terms that depend on the distance between key and query to logits: ALiBi slopes and a
// relative bias, in accumulator fragments of S = Q K^T or of S^T = K Q^T. Their gradients are sums
// of dS along diagonals: see modifiers/distance_gradient.cuh.
//
//   distance of query i and key j    d = j - i - query_offset
//   ALiBi adds                       slope * d    (Press et al., "Train short, test long", 2022)
//   a relative bias of R numbers     number clamp(d + R / 2, 0, R - 1)
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/math.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Returns a - b, saturated to the range of int32.
__device__ __forceinline__ int32_t sub_sat(int32_t a, int32_t b) {
  int32_t result;
  asm("sub.sat.s32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Returns the key that is nearest to a row's own position.
__device__ __forceinline__ int32_t nearest_key(int32_t row, int32_t query_offset, int32_t q_len,
                                               int32_t kv_len) {
  const int32_t shift = min(max(query_offset, -q_len), kv_len);
  return min(max(row + shift, 0), kv_len - 1);
}

// Holds the slope and the relative bias of one batch and head. In calls without both, `present` is
// false.
struct DistanceBias {
  float slope = 0.0f;
  int32_t query_offset = 0;
  int32_t count = 0;  // R, or 0
  const float* table = nullptr;
  bool present = false;

  DistanceBias() = default;
  // `at(operand)` returns the address of an operand's first number for the batch and head, as a
  // pointer to float.
  template <typename At>
  __device__ __forceinline__ DistanceBias(const Forward& params, At at)
      : present(params.alibi_slopes || params.relative_bias) {
    if (!present) return;
    if (params.alibi_slopes) slope = *at(params.alibi_slopes);
    if (params.relative_bias) table = at(params.relative_bias);
    if (params.relative_bias) count = params.distances;
    if (params.query_offset)
      query_offset = *reinterpret_cast<const int32_t*>(at(params.query_offset));
  }
  __device__ __forceinline__ DistanceBias(const Forward& params, const BatchIndex& batch,
                                          int32_t head)
      : DistanceBias(params, [&]([[maybe_unused]] const Operand& operand) {
          return batch.pointer<const float>(operand, head);  // all have elements of 4 bytes
        }) {}

  __device__ __forceinline__ float at(int32_t row, int32_t col) const {
    const int32_t distance = sub_sat(col - row, query_offset);
    const float added = slope * static_cast<float>(distance);
    return table == nullptr ? added : added + table[index(distance)];
  }
  // Returns the index of a distance in the table.
  __device__ __forceinline__ int32_t index(int32_t distance) const {
    const int32_t half = count / 2;
    return min(max(distance, -half), count - 1 - half) + half;
  }

  // Returns the key that is nearest to a row's own position.
  __device__ __forceinline__ int32_t nearest(int32_t row, int32_t q_len, int32_t kv_len) const {
    return nearest_key(row, query_offset, q_len, kv_len);
  }

  // Multiplies products by `scale` and adds the terms.
  template <int kN>
  __device__ __forceinline__ void add(float (&scores)[kN][4], float scale, int32_t row0,
                                      int32_t col0) const {
    visit(
        scores, scale, col0 + fragment_col(0, 0) - row0,
        [](int half) { return -fragment_row(0, 2 * half); },
        [](int n, int e) { return n * 8 + e; });
  }
  // Does the same for fragments of S^T: their rows are keys from key0 on, their columns queries
  // from row0 on.
  template <int kN>
  __device__ __forceinline__ void add_transposed(float (&scores)[kN][4], float scale, int32_t key0,
                                                 int32_t row0) const {
    visit(
        scores, scale, key0 - row0 - fragment_col(0, 0),
        [](int half) { return fragment_row(0, 2 * half); },
        [](int n, int e) { return -(n * 8 + e); });
  }

 private:
  // Adds the terms. An element's distance is base + of_row(half) + of_col(n, e) - query_offset.
  template <int kN, typename OfRow, typename OfCol>
  __device__ __forceinline__ void visit(float (&scores)[kN][4], float scale, int32_t base,
                                        OfRow of_row, OfCol of_col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t first = sub_sat(base + of_row(half), query_offset);
      const float distance = static_cast<float>(first);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // Up to 2^24, the sum of floats is exact, and beyond it is as exact as a float can be. A
          // conversion for each element would take four times as long.
          float& score = scores[n][2 * half + e];
          score = fmaf(score, scale, slope * (distance + static_cast<float>(of_col(n, e))));
          if (table != nullptr) score += table[index(sub_sat(first, -of_col(n, e)))];
        }
      }
    }
  }
};

// Up to this magnitude, float32 rounds terms of a logit by so little that P is right to 0.1%.
inline constexpr float kFarTerm = 4096.0f;

// Returns true if a head's terms of distances may exceed kFarTerm. Logits and their lse then
// contain rounded terms, so differences of distances may not be used for rows whose lse does.
__device__ __forceinline__ bool may_have_far_terms(const Shape& shape, float slope,
                                                   int32_t query_offset) {
  const float greatest = static_cast<float>(shape.q_len) + static_cast<float>(shape.kv_len) +
                         fabsf(static_cast<float>(query_offset));
  return !(fabsf(slope) * greatest <= kFarTerm);
}

// Holds a head's ALiBi slope, and the slope's gradient, for a consumer of a backward kernel with
// fragments of S^T. lse contains the terms that depend on the query alone: see shifted_lse().
// `Gradient`: TransposedGradient of the tile.
struct TransposedSlope {
  float slope = 0.0f;
  int32_t query_offset = 0;
  float gradient = 0.0f;  // this thread's sum of dS times the distance

  __device__ __forceinline__ void begin(const Forward& params, const BatchIndex& batch,
                                        int32_t head) {
    slope = *batch.pointer<const float>(params.alibi_slopes, head);
    if (params.query_offset) query_offset = *batch.pointer<const int32_t>(params.query_offset);
  }

  // Computes P^T of the queries from gradient.row0 on, a multiple of 64.
  template <typename Gradient, int kN, typename Columns>
  __device__ __forceinline__ void probabilities(const Gradient& gradient, float (&scores)[kN][4],
                                                const Columns& lse, const float*,
                                                float to_log2) const {
    if (may_have_far_terms(gradient.params.shape, slope, query_offset) && has_far_row<kN>(lse))
        [[unlikely]] {
      return far_probabilities(gradient, scores, lse);
    }
    const Shape& shape = gradient.params.shape;
    const int32_t nearest = nearest_key(gradient.row0, query_offset, shape.q_len, shape.kv_len);
    // Beyond 1e28, terms of other distances than 0 might be infinite, and NaN if a key is
    // forbidden.
    const float bounded = fminf(fmaxf(slope, -1e28f), 1e28f);
    float added[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = gradient.key0 + fragment_row(0, 2 * half);
      added[half] = bounded * kLog2E * static_cast<float>(key - nearest);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 shift = lse(n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float logit = fmaf(scores[n][e], to_log2, added[e / 2]);
        scores[n][e] = ptx::ex2_approx_ftz(logit - (e % 2 ? shift.y : shift.x));
      }
    }
  }

  // Adds the tile's part of the gradient, given dS^T.
  template <typename Gradient, int kN>
  __device__ __forceinline__ void add(const Gradient& of, const float (&dscores)[kN][4]) {
    float sums[2] = {}, moment = 0.0f;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[e / 2] += dscores[n][e];
        moment = fmaf(dscores[n][e], static_cast<float>(n * 8 + e % 2), moment);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t shift = of.key0 + fragment_row(0, 2 * half) - of.row0 - fragment_col(0, 0);
      gradient = fmaf(sums[half], static_cast<float>(sub_sat(shift, query_offset)), gradient);
    }
    gradient -= moment;
  }

  // Adds the warp's gradient, times `factor`, to that of the head. Called by whole warps.
  __device__ __forceinline__ void finish(const Backward& params, const BatchIndex& batch,
                                         int32_t head, float factor) {
    if (!params.dalibi_slopes) return;
    float sum = gradient * factor;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    if (threadIdx.x % 32 == 0) atomicAdd(batch.pointer<float>(params.dalibi_slopes, head), sum);
    gradient = 0.0f;
  }

 private:
  // Returns whether shifted_lse() is NaN for a row of the warp's tile.
  template <int kN, typename Columns>
  static __device__ __forceinline__ bool has_far_row(const Columns& lse) {
    float sum = 0.0f;  // no row has -inf
#pragma unroll
    for (int n = 0; n < kN; ++n) sum += lse(n).x + lse(n).y;
    return __any_sync(0xffffffff, isnan(sum));
  }

  // Computes P^T from logits as they are defined, and from their lse.
  template <typename Gradient, int kN, typename Columns>
  __device__ __forceinline__ void far_probabilities(const Gradient& gradient,
                                                    float (&scores)[kN][4],
                                                    const Columns& lse) const {
    const Forward& params = gradient.params;
    // lse and lse_low have equal shapes, and neighbouring rows side by side. One index for both
    // needs fewer registers than two pointers.
    const auto* lse_data = static_cast<const float*>(params.lse.data);
    const auto* low_data = static_cast<const float*>(params.lse_low.data);
    const int64_t first =
        gradient.batch.template pointer<const float>(params.lse, gradient.head) - lse_data;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 shift = lse(n);  // inf for rows without probabilities
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t row = gradient.row0 + fragment_col(n, e);
        const int32_t key = gradient.key0 + fragment_row(0, e);
        const float added = slope * static_cast<float>(sub_sat(key - row, query_offset));
        const float logit = fmaf(scores[n][e], params.options.scale, added);
        const int64_t last = min(row, params.shape.q_len - 1);
        const float difference = logit - lse_data[first + last] - low_data[first + last];
        const bool dead = (e % 2 ? shift.y : shift.x) == -minus_infinity();
        const bool none = dead || scores[n][e] == minus_infinity();
        scores[n][e] = none ? 0.0f : ptx::ex2_approx_ftz(difference * kLog2E);
      }
    }
  }
};

// Returns a row's lse in log2 units as TransposedSlope takes it: relative to the term that the
// slope adds for the key nearest to the first of 64 rows. The terms of keys near the row are then
// small, even if their distances are not. NaN marks a row that needs the definition, since its lse
// is far from 0 or from the nearest key's term.
__device__ __forceinline__ float shifted_lse(const Forward& params, const DistanceBias& distance,
                                             int32_t row, float lse, float lse_low) {
  const Shape& shape = params.shape;
  const int32_t nearest = distance.nearest(row, shape.q_len, shape.kv_len);
  const int32_t first = distance.nearest(row / 64 * 64, shape.q_len, shape.kv_len);
  const auto shift = static_cast<float>(sub_sat(nearest - row, distance.query_offset));
  const float own = fmaf(-distance.slope, shift, lse) + lse_low;
  const float shifted = fmaf(distance.slope, static_cast<float>(nearest - first), own);
  const bool near = fabsf(lse) <= kFarTerm && fabsf(shifted) <= kFarTerm;
  const bool far = !near && may_have_far_terms(shape, distance.slope, distance.query_offset);
  return far ? __int_as_float(0x7fffffff) : shifted * kLog2E;
}

}  // namespace jax_flash
