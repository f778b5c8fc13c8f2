// Wraps the instructions of warpgroups that order matrix products, reallocate registers and
// synchronize at named barriers. PTX ISA, "Asynchronous warpgroup level matrix instructions",
// "setmaxnreg", "barrier". cmake/generate_wgmma.py generates the products themselves.
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// If registers that a product uses, accumulators included, have been written, this must precede the
// product.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are in flight. wgmma_results() must follow for
// the accumulators of complete groups before they are read.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from using accumulators before the wait that precedes this call.
template <int kBlocks>
__device__ __forceinline__ void wgmma_results(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
  }
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Synchronizes `threads` threads, in whole warps, at a named barrier. Barrier 0 is __syncthreads().
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Does the same, and returns whether `value` is true in some thread.
__device__ __forceinline__ bool barrier_any(int id, int threads, bool value) {
  uint32_t any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; "
      "barrier.cta.red.or.aligned.pred q, %1, %2, p; selp.u32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace jax_flash::ptx
