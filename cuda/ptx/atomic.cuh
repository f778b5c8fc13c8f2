// Wraps atomic operations in global memory. PTX ISA, "Parallel synchronization and communication
// instructions: atom".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Adds 1 and returns the previous value. To be called by one thread of a warp. For atomicAdd(), the
// compiler would generate code that combines the additions of a warp.
__device__ __forceinline__ int32_t atomic_increment(int32_t* counter) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

}  // namespace jax_flash::ptx
