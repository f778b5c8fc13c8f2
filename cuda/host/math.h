// exp and tanh of a vector, to about one unit in the last place of float32.
// The polynomials are minimax fits made for this file (Remez exchange).
#pragma once

#include "host/simd.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// e^x for x <= 88; 0 below -87, where float32 turns subnormal; NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts so that r is accurate for
// large n too; e^r is a polynomial. Adding kRound leaves n + 127 in the low bits
// of the sum: shifted into place, they are 2^n.
JAX_FLASH_INLINE Vec exp(Vec x) {
  constexpr float kRound = 0x1.8p23f + 127;
  constexpr float kLog2E = 1.44269504f, kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  const Vec shifted = x * kLog2E + kRound;
  const Vec n = shifted - kRound;
  const Vec r = (x - n * kLn2High) - n * kLn2Low;
  Vec q = r * 0.00138144693f + 0.00836878034f;
  q = q * r + 0.0416683942f;
  q = q * r + 0.166665201f;
  q = q * r + 0.499999934f;
  const Vec e = (q * r + 1.0f) * r + 1.0f;
  const Vec power = (Vec)(bits_of(shifted) << 23);
  return x < -87.0f ? Vec{} : e * power;
}

JAX_FLASH_INLINE float exp(float x) { return exp(splat(x))[0]; }

// tanh x: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
JAX_FLASH_INLINE Vec tanh(Vec x) {
  const VecI sign = bits_of(x) & INT32_MIN;
  const Vec magnitude = (Vec)(bits_of(x) ^ sign);
  const Vec square = x * x;
  Vec q = square * -0.00571704982f + 0.0206505917f;
  q = q * square + -0.0537435003f;
  q = q * square + 0.133314908f;
  q = q * square + -0.333332837f;
  const Vec small = x + x * square * q;
  const Vec clamped = magnitude > 10.0f ? splat(10.0f) : magnitude;  // tanh 10 rounds to 1
  const Vec large = 1.0f - 2.0f / (exp(clamped + clamped) + 1.0f);
  return magnitude < 0.625f ? small : (Vec)(bits_of(large) | sign);
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
