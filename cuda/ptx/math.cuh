// Wraps single-instruction arithmetic and conversions. PTX ISA, "Floating-point instructions: ex2,
// max, rcp" and "Data movement and conversion: cvt".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jax_flash::ptx {

// Returns 2^x with a relative error below 2^-22. Subnormal results are flushed to zero.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns x y, clamped to [0, 1]. A NaN becomes 0.
__device__ __forceinline__ float mul_sat(float x, float y) {
  float product;
  asm("mul.sat.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

// Returns the greater number, or NaN if either is NaN.
__device__ __forceinline__ float max_nan(float x, float y) {
  float greater;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(greater) : "f"(x), "f"(y));
  return greater;
}

// Returns log2(x) with an absolute error below 2^-22 near 1. Subnormal numbers are flushed to zero.
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns 1 / x with a relative error below 2^-23. Subnormal numbers are flushed to zero.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two floats to 16 bits, to nearest, ties to even. `low` becomes the lower half.
template <typename Element>
__device__ __forceinline__ uint32_t cvt_rn_x2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Rounds in the same way; negative numbers become 0.
template <typename Element>
__device__ __forceinline__ uint32_t cvt_rn_relu_x2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// Converts two bfloat16 numbers to float16, rounded to nearest, ties to even.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_bf16x2(uint32_t pair) {
  return cvt_rn_x2<__half>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

}  // namespace jax_flash::ptx
