// Wraps barriers in shared memory at which threads and asynchronous copies arrive: sm_90. PTX ISA,
// "Parallel synchronization and communication instructions: mbarrier".
#pragma once

#include <cstdint>

// Repeats an instruction that tests a phase until it sets the predicate `done`.
#define JAX_FLASH_UNTIL_DONE(test, ...)                                        \
  asm volatile("{\n.reg .pred done;\nagain:\n" test                            \
               "\n@done bra finished;\nbra again;\nfinished:\n}" ::__VA_ARGS__ \
               : "memory")

namespace jax_flash::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier_smem, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(arrivals)
               : "memory");
}

// Makes initialized barriers visible to asynchronous copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

// Arrives, and makes the current phase also wait for `bytes` of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier_smem, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem),
               "r"(bytes)
               : "memory");
}

// Waits for the end of the phase with this parity. The first phase of a barrier has parity 0. A
// wait for parity 1 before that returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier_smem, uint32_t parity) {
  JAX_FLASH_UNTIL_DONE("mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;",
                       "r"(barrier_smem), "r"(parity));
}

// Returns whether the phase with this parity has ended. May suspend the thread for up to
// `nanoseconds`.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier_smem, uint32_t parity,
                                                  uint32_t nanoseconds) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier_smem), "r"(parity), "r"(nanoseconds)
      : "memory");
  return done != 0;
}

// Waits like mbarrier_wait(), for a thread that may sleep longer. It tests less often, because each
// test takes issue slots from other warps.
__device__ __forceinline__ void mbarrier_wait_asleep(uint32_t barrier_smem, uint32_t parity) {
  constexpr uint32_t kNanoseconds = 10'000'000;  // the longest time between tests
  JAX_FLASH_UNTIL_DONE("mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;",
                       "r"(barrier_smem), "r"(parity), "r"(kNanoseconds));
}

}  // namespace jax_flash::ptx
