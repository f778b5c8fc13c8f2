// Splits float32 operands of products into two numbers of float16 each: the greater part, and the
// rest, which is at most 2^-11 of the number. float16 has 11 significant bits, so the two are off
// by at most 2^-23 of the number. The product of two rests, at most 2^-22 of the whole, is left
// out. Two TF32 numbers are as exact, but the tensor cores multiply float16 twice as fast, and
// transpose it.
//
// float16 has few exponents. Operands are therefore multiplied by a power of two first, which
// brings the greatest of those that share it to 2^14 to 2^15. Numbers of at least 2^-16 of the
// greatest are then off by at most 2^-23 of themselves. Smaller ones lose bits of their rests, and
// are off by at most 2^-39 of the greatest.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace jax_flash::ptx {

inline constexpr int kSplitNumbers = 2;

// Returns the power of two, at most 2^120, that brings `greatest`, which is not negative, to 2^14
// to 2^15. Returns 1 for 0, subnormal numbers, infinity and NaN.
__device__ __forceinline__ float split_factor(float greatest) {
  const int exponent = static_cast<int>(__float_as_uint(greatest) >> 23);
  // At most 2^120, so that products with the magnitude hardly ever underflow.
  const int power = min(127 + 127 + 14 - exponent, 127 + 120);
  return exponent == 0 || exponent == 255 ? 1.0f : __uint_as_float(power << 23);
}
// Returns 2^14 over such a power: the magnitude of the numbers that it is for. Tiles come with
// magnitudes, not with inverse powers, since products with these may underflow.
__device__ __forceinline__ float split_magnitude(float power) {
  return __uint_as_float(((127u + 127u + 14u) << 23) - __float_as_uint(power));
}
// The factor of products of split operands, beside the magnitudes of both.
inline constexpr float kSplitProduct = 0x1p-28f;

// Splits two numbers. `low` goes to the lower halves. Infinity and NaN have the rest NaN.
__device__ __forceinline__ void split(float low, float high, uint32_t (&words)[kSplitNumbers]) {
  const __half2 parts = __floats2half2_rn(low, high);
  const float2 taken = __half22float2(parts);
  const __half2 rests = __floats2half2_rn(low - taken.x, high - taken.y);
  words[0] = *reinterpret_cast<const uint32_t*>(&parts);
  words[1] = *reinterpret_cast<const uint32_t*>(&rests);
}

}  // namespace jax_flash::ptx
