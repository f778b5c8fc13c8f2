// Computes exp and tanh of vectors, with errors of about one unit in the last place of float32. The
// polynomials are minimax fits made for this file (Remez exchange).
#pragma once

#include "host/simd.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Calls f(0), ..., f(kCount - 1).
template <int kCount, typename F>
JAX_FLASH_INLINE void each(F f) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) f(i);
}

// Replaces x by e^x, for x <= 88. Below -87, where e^x becomes subnormal, the result is 0. NaN
// stays NaN. Each step is done for all vectors before the next step, because the steps of one
// vector depend on each other.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial gives e^r. After the addition of kRound,
// the low bits of the sum are n + 127; shifted into the exponent, they are 2^n. As ln 2 is rounded,
// r has an error of 2^-28 |x|, or of 2^-24 |x| without fused multiply-adds. x is a rounded
// difference of logits, which itself has an error of up to 2^-24 |x|.
template <int kCount>
JAX_FLASH_INLINE void exp(Vec (&x)[kCount]) {
  constexpr float kRound = 0x1.8p23f + 127;
  constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
  Vec n[kCount], r[kCount], q[kCount], power[kCount];
  each<kCount>([&](int i) { n[i] = x[i] * kLog2E + kRound; });
  each<kCount>([&](int i) { power[i] = (Vec)(bits_of(n[i]) << 23); });
  each<kCount>([&](int i) { n[i] -= kRound; });
  each<kCount>([&](int i) { r[i] = x[i] - n[i] * kLn2; });
  each<kCount>([&](int i) { q[i] = r[i] * 0.00138144693f + 0.00836878034f; });
  each<kCount>([&](int i) { q[i] = q[i] * r[i] + 0.0416683942f; });
  each<kCount>([&](int i) { q[i] = q[i] * r[i] + 0.166665201f; });
  each<kCount>([&](int i) { q[i] = q[i] * r[i] + 0.499999934f; });
  each<kCount>([&](int i) { q[i] = q[i] * r[i] + 1.0f; });
  each<kCount>([&](int i) { q[i] = q[i] * r[i] + 1.0f; });
  each<kCount>([&](int i) { x[i] = x[i] < -87.0f ? Vec{} : q[i] * power[i]; });
}

JAX_FLASH_INLINE Vec exp(Vec x) {
  Vec only[] = {x};
  exp(only);
  return only[0];
}

JAX_FLASH_INLINE float exp(float x) { return exp(splat(x))[0]; }

// Returns tanh x: 1 - 2 / (e^2x + 1), or an odd polynomial near 0, where this would cancel.
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
