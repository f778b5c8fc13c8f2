// Writes float32 operands of products as one or two numbers of float16. One has 11 significant
// bits, as TF32 has, but the tensor cores multiply float16 twice as fast, and transpose it. Two,
// the greater part and the rest, which is at most 2^-11 of the number, are off by at most 2^-23 of
// it. The product of two rests, at most 2^-22 of the whole, is left out.
//
// float16 has few exponents. Operands are therefore multiplied by a power of two first, which
// brings the greatest of those that share it to 2^14 to 2^15. One number of at least 2^-28 of the
// greatest is then off by at most 2^-12 of itself, and two numbers are off by at most 2^-23 if that
// is at least 2^-16 of the greatest. Smaller ones are off by at most 2^-39 of the greatest.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace jax_flash::ptx {

// Returns the power of two that brings `greatest`, which is not negative, to 2^14 to 2^15. It is at
// most 2^120, as for 0, and 1 for infinity and NaN.
__device__ __forceinline__ float split_factor(float greatest) {
  const int exponent = static_cast<int>(__float_as_uint(greatest) >> 23);
  // At most 2^120, so that products with the magnitude hardly ever underflow.
  const int power = min(127 + 127 + 14 - exponent, 127 + 120);
  return exponent == 255 ? 1.0f : __uint_as_float(power << 23);
}
// Returns 2^14 over such a power: the magnitude of the numbers that it is for. Tiles come with
// magnitudes, not with inverse powers, since products with these may underflow.
__device__ __forceinline__ float split_magnitude(float power) {
  return __uint_as_float(((127u + 127u + 14u) << 23) - __float_as_uint(power));
}
// The factor of products of such operands, beside the magnitudes of both.
inline constexpr float kSplitProduct = 0x1p-28f;

// Writes two numbers as kNumbers each. `low` goes to the lower halves. Infinity and NaN have the
// rest NaN.
template <int kNumbers>
__device__ __forceinline__ void split(float low, float high, uint32_t (&words)[kNumbers]) {
  const __half2 parts = __floats2half2_rn(low, high);
  words[0] = *reinterpret_cast<const uint32_t*>(&parts);
  if constexpr (kNumbers == 2) {
    const float2 taken = __half22float2(parts);
    const __half2 rests = __floats2half2_rn(low - taken.x, high - taken.y);
    words[1] = *reinterpret_cast<const uint32_t*>(&rests);
  }
}

}  // namespace jax_flash::ptx
