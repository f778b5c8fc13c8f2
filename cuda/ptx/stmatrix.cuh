// Stores 8x8 matrices of 16-bit elements from mma fragments to shared memory: sm_90. PTX ISA,
// "Warp-level matrix store instruction: stmatrix".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Stores four matrices. Lane 8 i + r passes the address of row r of matrix i. Lane 4 g + t passes
// columns 2 t and 2 t + 1 of row g of matrix i in d[i].
__device__ __forceinline__ void stmatrix_x4(uint32_t address_smem, const uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address_smem),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}

}  // namespace jax_flash::ptx
