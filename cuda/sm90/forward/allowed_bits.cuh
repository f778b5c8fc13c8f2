// Forbids elements of a warp's tile, given as bits, in the sm_90 forward kernels for a mask,
// segments or float32, and in the backward kernel for dQ of float32.
#pragma once

#include <cstdint>

#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/mask_words.h"
#include "tile/band.cuh"
#include "tile/matmul.cuh"

namespace jax_flash::sm90 {

// Holds the columns that a thread's two rows may attend to: in row[half], bit 2 n + e stands for
// column fragment_col(n, e).
struct AllowedBits {
  uint32_t row[2];
};
template <int kN>
inline constexpr uint32_t kAllBits = kN == 16 ? ~0u : (1u << 2 * kN) - 1;

// Returns an element's bit from a mask's words (plan/mask_words.h). `row_stride`: pairs of words
// from one group of 64 rows to the next.
template <int kBlockKv>
__device__ __forceinline__ bool is_allowed(const uint2* pairs, int64_t row_stride, int32_t row,
                                           int32_t col) {
  const int32_t in_group = row % MaskWords::kRows, in_tile = col % kBlockKv;
  const int32_t thread = in_group / 16 * 32 + in_group % 8 * 4 + in_tile % 8 / 2;
  const uint2 pair =
      pairs[row / MaskWords::kRows * row_stride + col / kBlockKv * MaskWords::kThreads + thread];
  const uint32_t bits = in_group % 16 < 8 ? pair.x : pair.y;
  return bits >> (in_tile / 8 * 2 + in_tile % 2) & 1;
}

// Returns the bits of columns below `end`, counted from the thread's first.
__device__ __forceinline__ uint32_t bits_below(int32_t end) {
  const int32_t count = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// Clears the bits of columns that the band forbids, and of rows that do not exist.
__device__ __forceinline__ void forbid_edges(AllowedBits& allowed, const Band& band, int32_t row0,
                                             int32_t col0) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half), base = col0 + fragment_col(0, 0);
    const uint32_t bits =
        bits_below(band.end_col(row) - base) & ~bits_below(band.first_col(row) - base);
    allowed.row[half] &= row < band.q_len ? bits : 0;
  }
}

// Returns a bit per column of this thread, set if its warp attends to it.
template <int kN>
__device__ __forceinline__ uint32_t attended_by_warp(const AllowedBits& allowed) {
  uint32_t bits = allowed.row[0] | allowed.row[1];
#pragma unroll
  for (int distance = 4; distance < 32; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  return bits;
}

// Sets forbidden elements of kBlocks blocks from n on to -inf. The bits of one row follow those of
// the other, so that R2P turns them into predicates.
template <int kBlocks, int kN>
__device__ __forceinline__ void forbid(float (&scores)[kN][4], const AllowedBits& allowed, int n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      if (n + i / 2 >= kN) continue;
      float& score = scores[n + i / 2][2 * half + i % 2];
      if (!(allowed.row[half] >> (2 * n + i) & 1)) score = minus_infinity();
    }
  }
}
// Does the same by adding -inf, which takes half as long as a selection. A forbidden NaN or +inf
// becomes NaN.
template <int kBlocks, int kN>
__device__ __forceinline__ void forbid_finite(float (&scores)[kN][4], const AllowedBits& allowed,
                                              int n) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      if (n + i / 2 >= kN) continue;
      asm("{ .reg .pred p; setp.eq.u32 p, %1, 0; @p add.f32 %0, %0, %2; }"
          : "+f"(scores[n + i / 2][2 * half + i % 2])
          : "r"(allowed.row[half] & 1u << (2 * n + i)), "f"(minus_infinity()));
    }
  }
}

// Returns whether `row` may attend to `col`, which is below kv_len.
template <typename Config, uint32_t kModifiers>
__device__ __forceinline__ bool allows_element(const Forward& params,
                                               const ModifierOffsets& offsets, const Band& band,
                                               int32_t row, int32_t col) {
  if (row >= band.q_len || col < band.first_col(row) || col >= band.end_col(row)) return false;
  if constexpr ((kModifiers & kMask) != 0) {
    const Operand& mask = params.mask;
    if constexpr (Config::kMaskWords) {
      return is_allowed<Config::kBlockKv>(static_cast<const uint2*>(mask.data) + offsets.mask,
                                          mask.row, row, col);
    }
    return static_cast<const uint8_t*>(mask.data)[offsets.mask + row * mask.row + col * mask.col] !=
           0;
  } else {
    const Operand &queries = params.query_segment_ids, &keys = params.key_value_segment_ids;
    return static_cast<const int32_t*>(queries.data)[offsets.query_ids + row * queries.row] ==
           static_cast<const int32_t*>(keys.data)[offsets.key_ids + col * keys.row];
  }
}

}  // namespace jax_flash::sm90
