// Rounds float32 operands of products to TF32, the upper 19 bits of a float32, and splits them. The
// tensor cores ignore the other 13 bits.
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

inline constexpr uint32_t kTf32Bits = 0xffffe000, kHalfTf32 = 0x1000;

// Rounds to nearest, ties away from zero, but for the 13 bits that are ignored: as cvt.rna.tf32.f32
// does in twice as many instructions.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  // The addition would turn a NaN whose bits are all set, as computed ones are, into zero.
  return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000) ? bits + kHalfTf32 : bits;
}

// Return an operand's greater part, and set the rest. Products of two rests are left out, so one of
// the two operands is rounded, which gives rests of both signs, and the other truncated, which
// takes as many instructions for a rest that is rounded. What is not finite stays so: of NaN, at
// least one part is NaN, and infinity has the rest NaN or 0.
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
