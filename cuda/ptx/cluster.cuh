// Wraps the instructions of thread block clusters: sm_90. PTX ISA, "Special registers:
// %cluster_ctarank", "mapa", "mbarrier.arrive", "mbarrier.try_wait", "barrier.cluster", "st.async".
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"

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

// Returns the address for a matrix descriptor. From bit 24 on, an address in shared memory holds
// the block's rank in its cluster. Loads, stores and copies need it, but a descriptor has no room
// for it.
__device__ __forceinline__ uint32_t without_block_rank(uint32_t address_smem) {
  return address_smem & 0xffffff;
}

// Arrives at an mbarrier of any block of the cluster. This thread's earlier accesses to memory are
// not ordered before the arrival for other blocks: `.release.cluster` would wait until they are
// visible to the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier_cluster) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_cluster) : "memory");
}

// Waits like mbarrier_wait(), for what other blocks of the cluster have stored.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier_smem, uint32_t parity) {
  JAX_FLASH_UNTIL_DONE("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;",
                       "r"(barrier_smem), "r"(parity));
}

// Stores 16 bytes to the shared memory of any block of the cluster. They count as bytes that the
// phase of an mbarrier of the same block waits for.
__device__ __forceinline__ void st_async_v4(uint32_t address_cluster, uint4 value,
                                            uint32_t barrier_cluster) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::
          "r"(address_cluster),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier_cluster)
      : "memory");
}

}  // namespace jax_flash::ptx
