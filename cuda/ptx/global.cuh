// Wraps stores, reductions, ordered accesses and prefetches in global memory. PTX ISA, "Parallel
// synchronization and communication instructions: red" and "Data movement and conversion
// instructions: ld, st, prefetch".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Store if `condition` holds. A store in a conditional statement becomes a branch, across which the
// assembler interleaves nothing; these are predicated. The compiler may move other accesses to
// memory past them.
__device__ __forceinline__ void st_f32_if(bool condition, float* address, float value) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n"
      "@p st.global.f32 [%1], %2;\n}" ::"r"(int32_t{condition}),
      "l"(address), "f"(value));
}
__device__ __forceinline__ void st_v4_if(bool condition, void* address, const uint4& value) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n"
      "@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int32_t{condition}),
      "l"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w));
}

__device__ __forceinline__ void red_add_f32(float* address, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}

// Add to two or four contiguous floats in one instruction; sm_90 and later.
__device__ __forceinline__ void red_add_v2_f32(float* address, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(x), "f"(y)
               : "memory");
}
__device__ __forceinline__ void red_add_v4_f32(float* address, const float (&value)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
               : "memory");
}

__device__ __forceinline__ int32_t ld_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Loads without ordering. To acquire, a fence_acquire() must follow. Unlike ld.acquire, this allows
// other work between the load and the fence. sm_90 and later.
__device__ __forceinline__ int32_t ld_relaxed(const int32_t* address) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void fence_acquire() { asm volatile("fence.acquire.gpu;" ::: "memory"); }

__device__ __forceinline__ void st_release(int32_t* address, int32_t value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)) : "memory");
}

// Adds with release semantics: everything that this thread has written or observed becomes visible
// before the sum does.
__device__ __forceinline__ void red_release_add(int32_t* address, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

}  // namespace jax_flash::ptx
