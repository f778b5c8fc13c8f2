// Wraps the warp-level matrix multiply-accumulate. PTX ISA, "Warp-level matrix instructions: mma".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jax_flash::ptx {

// Computes d[16, 8] += a[16, 16] b[16, 8], float32 accumulators. With lane = 4 g + t, a thread
// holds
//   d: rows g, g, g + 8, g + 8 and columns 2 t, 2 t + 1, 2 t, 2 t + 1
//   a: pairs of columns 2 t of rows g, g + 8, then pairs of columns 2 t + 8 of the same rows
//   b: pairs of rows 2 t, then of rows 2 t + 8, of column g
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Computes d[16, 8] += a[16, 8] b[8, 8] of TF32 operands: float32 whose last 13 bits are ignored.
// With lane = 4 g + t, a thread holds
//   d: as above
//   a: column t of rows g and g + 8, then column t + 4 of the same rows
//   b: rows t and t + 4 of column g
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace jax_flash::ptx
