// Rounds float32 operands of products to TF32, the upper 19 bits of a float32.
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Rounds to nearest, ties away from zero, where the last 13 bits are ignored. It is
// cvt.rna.tf32.f32 without clearing these bits, which takes twice as many instructions.
__device__ __forceinline__ uint32_t add_half_tf32(uint32_t bits) {
  // The addition would make another number of a NaN whose bits are all set.
  return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000) ? bits + 0x1000 : bits;
}

// Rounds the four words of a fragment to TF32. With kSplit, `rest` gets what that takes away,
// rounded likewise.
template <bool kSplit>
__device__ __forceinline__ void round_to_tf32(uint32_t (&fragment)[4], uint32_t (&rest)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t rounded = add_half_tf32(fragment[i]);
    if constexpr (kSplit) {
      const uint32_t kept = rounded & 0xffffe000;
      // What is left of infinity, NaN with all bits set, becomes 0.
      rest[i] = __float_as_uint(__uint_as_float(fragment[i]) - __uint_as_float(kept)) + 0x1000;
      fragment[i] = kept;
    } else {
      fragment[i] = rounded;
    }
  }
}

}  // namespace jax_flash::ptx
