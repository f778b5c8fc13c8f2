// Masks of keys: masks that all queries of a head share, such as those of padded batches. The
// kernels for short sequences, sm90/forward/short.cuh and sm90/backward/short.cuh, and one of
// sm90/backward/narrow.cuh keep a bit for each key, which is 1 if queries may attend to it. The
// other forward kernels for such masks are in sm90/forward/key_mask.cuh. Kernels for float32 read
// bits that sm90/float32_tiles.cuh writes.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/float32_tiles.h"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Describes the mask of a call. A row is a key's element, of one byte.
inline RowsOperand key_mask_of(const Forward& params) {
  RowsOperand mask(params.mask);
  mask.row = params.mask.col;
  return mask;
}

// Sets the logits of forbidden keys to -inf. `words`: the bits of the first 32 keys of the tile,
// and of the next.
template <int kN>
__device__ __forceinline__ void forbid_keys(float (&scores)[1][kN][4], const uint2& words) {
  const uint32_t bits[2] = {words.x >> threadIdx.x % 4 * 2, words.y >> threadIdx.x % 4 * 2};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!(bits[n / 4] >> (n % 4 * 8 + e % 2) & 1)) scores[0][n][e] = minus_infinity();
    }
  }
}

// Does the same in fragments whose rows are keys. `bits`: bit 0 of the thread's first key, bit 8 of
// the other.
inline constexpr uint32_t kTwoKeys = 1 | 1 << 8;
template <int kN>
__device__ __forceinline__ void forbid_key_rows(float (&scores)[kN][4], uint32_t bits) {
  if (__all_sync(0xffffffff, bits == kTwoKeys)) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!(bits >> e / 2 * 8 & 1)) scores[n][e] = minus_infinity();
    }
  }
}

}  // namespace jax_flash::sm90
