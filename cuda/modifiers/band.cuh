// Masks logits in accumulator fragments by the band: the pairs that position allows
// (tile/band.cuh).
#pragma once

#include <cstdint>

#include "tile/band.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Sets a thread's elements in one of its rows to -inf where the column is outside of [first, end).
template <int kN>
__device__ __forceinline__ void forbid_outside(float (&block)[kN][4], int half, int32_t first,
                                               int32_t end) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int col = n * 8 + e;
      if (col < first || col >= end) block[n][2 * half + e] = minus_infinity();
    }
  }
}

// Sets elements of S^T that the band does not allow to -inf. The fragments' rows are keys from key0
// on, their columns queries from row0 on.
template <int kN>
__device__ __forceinline__ void mask_band_transposed(float (&scores)[kN][4], const Band& band,
                                                     int32_t key0, int32_t row0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t key = key0 + fragment_row(0, 2 * half), base = row0 + fragment_col(0, 0);
    const int32_t first = band.first_row(key) - base;
    const int32_t end = key < band.kv_len ? band.end_row(key + 1) - base : INT32_MIN;
    forbid_outside(scores, half, first, end);
  }
}

// Sets elements that the band does not allow to -inf. Row 0 and column 0 of the fragments are row0
// and col0 of the logits.
template <int kM, int kN>
__device__ __forceinline__ void mask_band(float (&logits)[kM][kN][4], const Band& band,
                                          int32_t row0, int32_t col0) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + fragment_row(m, 2 * half);
      const int32_t base = col0 + fragment_col(0, 0);
      forbid_outside(logits[m], half, band.first_col(row) - base, band.end_col(row) - base);
    }
  }
}

}  // namespace jax_flash
