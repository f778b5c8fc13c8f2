// Wraps the instructions of thread block clusters: sm_90. PTX ISA, "Special registers:
// %cluster_ctarank", "mapa", "mbarrier.arrive", "barrier.cluster".
#pragma once

#include <cstdint>

namespace jax_flash::ptx {

// Returns the number of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster. Afterwards, their earlier writes to shared memory are
// visible.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Returns the address of the same variable in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address_smem, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(address_smem), "r"(rank));
  return address;
}

// Arrives at an mbarrier of any block of the cluster. This thread's earlier accesses to memory are
// not ordered before the arrival for other blocks: `.release.cluster` would wait until they are
// visible to the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier_cluster) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_cluster) : "memory");
}

}  // namespace jax_flash::ptx
