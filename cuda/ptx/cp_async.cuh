// Wraps asynchronous copies from global to shared memory that bypass registers. PTX ISA, "Data
// movement and conversion instructions: asynchronous copy".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Copies the first `bytes` of 16 bytes, and fills the rest with zeros.
__device__ __forceinline__ void cp_async_16_of(uint32_t address_smem, const void* gmem,
                                               int32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address_smem),
               "l"(gmem), "r"(bytes)
               : "memory");
}

// Copies 16 bytes, or writes 16 zero bytes and reads nothing if !valid.
__device__ __forceinline__ void cp_async_16(uint32_t address_smem, const void* gmem, bool valid) {
  cp_async_16_of(address_smem, gmem, valid ? 16 : 0);
}

// Copies 4 bytes, or writes zeros and reads nothing if !valid.
__device__ __forceinline__ void cp_async_4(uint32_t address_smem, const void* gmem, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address_smem), "l"(gmem),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_flash::ptx
