// Adds what depends on the distance between key and query to logits: ALiBi slopes and a relative
// bias, in accumulator fragments and in those of the transposed product. The gradients are sums of
// dS along diagonals: see modifiers/distance_gradient.cuh.
//
// The distance of query i and key j is d = j - i - query_offset. A slope adds slope * d (Press et
// al., "Train short, test long", 2022), a relative bias with R numbers adds number
// clamp(d + R / 2, 0, R - 1).
#pragma once

#include <cstdint>

#include "params.h"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Returns a - b, at the end of the range if it is beyond.
__device__ __forceinline__ int32_t sub_sat(int32_t a, int32_t b) {
  int32_t result;
  asm("sub.sat.s32 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Holds what one batch and head add. A call without them has `present` false.
struct DistanceBias {
  float slope = 0.0f;
  int32_t query_offset = 0;
  int32_t count = 0;  // R, or 0
  const float* table = nullptr;
  bool present = false;

  DistanceBias() = default;
  // `at(operand)` returns the address of an operand's first number for the batch and head.
  template <typename At>
  __device__ __forceinline__ DistanceBias(const Forward& params, At at)
      : present(params.alibi_slopes || params.relative_bias) {
    if (!present) return;
    if (params.alibi_slopes) slope = *static_cast<const float*>(at(params.alibi_slopes));
    if (params.relative_bias) table = static_cast<const float*>(at(params.relative_bias));
    if (params.relative_bias) count = params.distances;
    if (params.query_offset) query_offset = *static_cast<const int32_t*>(at(params.query_offset));
  }
  __device__ __forceinline__ DistanceBias(const Forward& params, const BatchIndex& batch,
                                          int32_t head)
      : DistanceBias(params, [&](const Operand& operand) -> const void* {
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

  // Multiplies products by `scale` and adds.
  template <int kN>
  __device__ __forceinline__ void add(float (&scores)[kN][4], float scale, int32_t row0,
                                      int32_t col0) const {
    visit(
        scores, scale, col0 + fragment_col(0, 0) - row0,
        [](int half) { return -fragment_row(0, 2 * half); },
        [](int n, int e) { return n * 8 + e; });
  }
  // Does so for fragments whose rows are keys from key0 on and whose columns are queries from row0
  // on.
  template <int kN>
  __device__ __forceinline__ void add_transposed(float (&scores)[kN][4], float scale, int32_t key0,
                                                 int32_t row0) const {
    visit(
        scores, scale, key0 - row0 - fragment_col(0, 0),
        [](int half) { return fragment_row(0, 2 * half); },
        [](int n, int e) { return -(n * 8 + e); });
  }

 private:
  // The distance of an element is that of `base`, of its row and of its column together.
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
          // Up to 2^24 the sum of floats is exact, and beyond it as exact as a float can be. A
          // conversion for each element would take four times as long.
          float& score = scores[n][2 * half + e];
          score = fmaf(score, scale, slope * (distance + static_cast<float>(of_col(n, e))));
          if (table != nullptr) score += table[index(sub_sat(first, -of_col(n, e)))];
        }
      }
    }
  }
};

}  // namespace jax_flash
