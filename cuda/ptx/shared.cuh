// Wraps loads, stores and atomic minima in shared memory, and the conversion of addresses. PTX ISA,
// "Data movement and conversion instructions: st, ld, cvta" and "Parallel synchronization and
// communication instructions: red".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer_smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer_smem));
}

__device__ __forceinline__ void st_shared_b32(uint32_t address_smem, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_smem), "r"(value) : "memory");
}

// Loads a value that other threads may lower at the same time by min_relaxed_shared_s32().
__device__ __forceinline__ int32_t ld_relaxed_shared_s32(uint32_t address_smem) {
  int32_t value;
  asm volatile("ld.relaxed.cta.shared.s32 %0, [%1];" : "=r"(value) : "r"(address_smem) : "memory");
  return value;
}

__device__ __forceinline__ void min_relaxed_shared_s32(uint32_t address_smem, int32_t value) {
  asm volatile("red.relaxed.cta.shared.min.s32 [%0], %1;" ::"r"(address_smem), "r"(value)
               : "memory");
}

__device__ __forceinline__ void st_shared_v2(uint32_t address_smem, uint2 value) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address_smem), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ __forceinline__ void st_shared_v4(uint32_t address_smem, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address_smem), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address_smem) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address_smem)
               : "memory");
  return value;
}

__device__ __forceinline__ uint2 ld_shared_v2(uint32_t address_smem) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(address_smem)
               : "memory");
  return value;
}

__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address_smem) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address_smem)
               : "memory");
  return value;
}

__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t address_smem) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address_smem)
               : "memory");
  return value;
}

}  // namespace jax_flash::ptx
