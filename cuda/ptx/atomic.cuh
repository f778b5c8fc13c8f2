// Wraps atomic operations in global memory. PTX ISA, "Parallel synchronization and communication
// instructions: atom".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Does atomicAdd() of 1, for one thread: for atomicAdd(), the compiler adds code that looks for
// other threads of the warp.
__device__ __forceinline__ int32_t atomic_increment(int32_t* counter) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

}  // namespace jax_flash::ptx
