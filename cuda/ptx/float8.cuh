// Wraps instructions of e4m3 numbers: sm_89 and later. PTX ISA, "Data movement and conversion: cvt"
// and "Warp level matrix instructions: mma".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Rounds four floats to nearest e4m3, ties to even, and saturates at 448. `a` becomes the lowest
// byte.
__device__ __forceinline__ uint32_t cvt_rn_e4m3x4(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Converts four numbers to float16, which holds them exactly: the lower two, and the higher two.
__device__ __forceinline__ void cvt_f16x2_e4m3x4(uint32_t packed, uint32_t& low, uint32_t& high) {
  asm("{\n"
      ".reg .b16 first, second;\n"
      "mov.b32 {first, second}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, first;\n"
      "cvt.rn.f16x2.e4m3x2 %1, second;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(packed));
}

// Adds a[16, 32] b[32, 8] to d. The fragments are those of wgmma.h.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace jax_flash::ptx
