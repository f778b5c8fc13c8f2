// Wraps movmatrix (PTX ISA 9.7.14.5.17, "Warp-level matrix transpose instruction").
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Transposes a matrix of 8 x 8 elements of 16 bits. A lane holds two of them: columns 2 (lane % 4)
// and 2 (lane % 4) + 1 of row lane / 4. The whole warp must call this.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

}  // namespace jax_flash::ptx
