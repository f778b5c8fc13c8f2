// Rounds float32 operands of products to TF32, or splits them into two TF32 numbers. TF32 is the
// upper 19 bits of a float32: the tensor cores ignore the other 13 bits.
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

inline constexpr uint32_t kTf32Bits = 0xffffe000, kHalfTf32 = 0x1000;

// Rounds to nearest, ties away from zero, and leaves arbitrary values in the 13 ignored bits.
// cvt.rna.tf32.f32 rounds in the same way in twice as many instructions.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  // Computed NaNs have all bits set, and the addition would turn them into zero.
  return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000) ? bits + kHalfTf32 : bits;
}

// Split an operand: return its greater part, and set `rest` to the remainder. Products of two
// rests are left out. Therefore one of the two operands is rounded, so that its rests have both
// signs. The other one is truncated, which leaves instructions to round its rest. Numbers that are
// not finite stay so: at least one part of a NaN that computations make is NaN, and infinity has
// the rest NaN or 0.
__device__ __forceinline__ uint32_t split_rounded(uint32_t bits, uint32_t& rest) {
  const uint32_t kept = (bits + kHalfTf32) & kTf32Bits;
  rest = __float_as_uint(__uint_as_float(bits) - __uint_as_float(kept));
  return kept;
}
__device__ __forceinline__ uint32_t split_truncated(uint32_t bits, uint32_t& rest) {
  const uint32_t kept = bits & kTf32Bits;
  rest = __float_as_uint(__uint_as_float(bits) - __uint_as_float(kept)) + kHalfTf32;
  return kept;
}

}  // namespace jax_flash::ptx
