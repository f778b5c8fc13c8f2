// Applies a boolean mask, one byte an element, to logits in accumulator fragments of S or S^T.
#pragma once

#include <cstdint>

#include "modifiers/pairs.cuh"
#include "params.h"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Sets elements whose mask is 0 to -inf. The mask of one batch and head begins at index `offset`.
template <int kInFlight, int kN>
__device__ __forceinline__ void apply_mask(float (&scores)[1][kN][4], const Operand& mask,
                                           int64_t offset, int32_t row0, int32_t col0,
                                           const Extent& extent) {
  for_pairs<uint8_t, kInFlight, kN>(static_cast<const uint8_t*>(mask.data) + offset, mask.row,
                                    mask.col, row0, col0, extent,
                                    [&](int n, int half, uint8_t first, uint8_t second) {
                                      if (!first) scores[0][n][2 * half] = minus_infinity();
                                      if (!second) scores[0][n][2 * half + 1] = minus_infinity();
                                    });
}

// Sets the first or second element of a pair to -inf if `first` or `second` is true.
template <int kN>
__device__ __forceinline__ void forbid_pair(float (&scores)[kN][4], int n, int half, bool first,
                                            bool second) {
  if (first) scores[n][2 * half] = minus_infinity();
  if (second) scores[n][2 * half + 1] = minus_infinity();
}

// Applies the mask to fragments of S^T, whose rows are keys and whose columns are queries. `data`:
// the mask of one batch and head.
template <int kN>
__device__ __forceinline__ void apply_mask_transposed(float (&scores)[kN][4], const Operand& mask,
                                                      const uint8_t* data, int32_t key0,
                                                      int32_t row0, const Extent& extent) {
  for_pairs<uint8_t, 4, kN>(
      data, mask.col, mask.row, key0, row0, extent,
      [&](int n, int half, uint8_t a, uint8_t b) { forbid_pair(scores, n, half, a == 0, b == 0); });
}
// Applies the mask's bits in the format of sm90's TransposedMask to fragments of S^T.
template <int kN>
__device__ __forceinline__ void apply_mask_bits(float (&scores)[kN][4], uint32_t allowed) {
  if (__all_sync(0xffffffff, allowed == ~0u)) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int bit = 8 * (e / 2 + n / 4 * 2) + n % 4 * 2 + e % 2;
      if (!(allowed >> bit & 1)) scores[n][e] = minus_infinity();
    }
  }
}

}  // namespace jax_flash
