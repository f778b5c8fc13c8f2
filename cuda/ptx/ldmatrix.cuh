// Loads 8x8 matrices of 16-bit elements from shared memory into mma fragments. PTX ISA, "Warp-level
// matrix load instruction: ldmatrix".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Loads four matrices. Lane 8 i + r passes the address of row r of matrix i. Lane 4 g + t receives
// columns 2 t and 2 t + 1 of row g of matrix i in d[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address_smem));
}

// Loads four matrices in the same way, and transposes them.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address_smem));
}

}  // namespace jax_flash::ptx
