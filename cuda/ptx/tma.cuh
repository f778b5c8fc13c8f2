// Wraps bulk copies by the tensor memory accelerator: sm_90. PTX ISA, "Data movement and conversion
// instructions: asynchronous copy, bulk and tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_flash::ptx {

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at these coordinates (innermost first) to shared memory, and reports its bytes to
// the barrier. Elements outside the tensor become zeros, and count, too.
__device__ __forceinline__ void cp_async_bulk_tensor_5d(uint32_t address_smem,
                                                        const CUtensorMap& map,
                                                        uint32_t barrier_smem, int32_t c0,
                                                        int32_t c1, int32_t c2, int32_t c3,
                                                        int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(address_smem),
      "l"(&map), "r"(barrier_smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Does the same for every block of the cluster whose bit in `blocks` is set. The box and the report
// go to the same addresses in the shared memory of each block.
__device__ __forceinline__ void cp_async_bulk_tensor_multicast_5d(
    uint32_t address_smem, const CUtensorMap& map, uint32_t barrier_smem, uint16_t blocks,
    int32_t c0, int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(address_smem),
      "l"(&map), "r"(barrier_smem), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Copies the box at these coordinates to L2.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_5d(const CUtensorMap& map, int32_t c0,
                                                                 int32_t c1, int32_t c2, int32_t c3,
                                                                 int32_t c4) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Copies shared memory to the box at these coordinates, without elements outside the tensor. The
// copy belongs to the bulk group that the thread commits next.
__device__ __forceinline__ void cp_async_bulk_tensor_store_5d(const CUtensorMap& map,
                                                              uint32_t address_smem, int32_t c0,
                                                              int32_t c1, int32_t c2, int32_t c3,
                                                              int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
      " [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(address_smem)
      : "memory");
}

// Copies `bytes`, a multiple of 16, from global to shared memory.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t address_smem, const void* gmem,
                                                   uint32_t bytes, uint32_t barrier_smem) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(address_smem),
      "l"(gmem), "r"(bytes), "r"(barrier_smem)
      : "memory");
}

// Copies `bytes`, a multiple of 16, from shared to global memory. The copy belongs to the bulk
// group that the thread commits next.
__device__ __forceinline__ void cp_async_bulk_store(void* gmem, uint32_t address_smem,
                                                    uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem),
               "r"(address_smem), "r"(bytes)
               : "memory");
}

// Adds `bytes` / 4 floats of shared memory to those in global memory. The copy belongs to the bulk
// group that the thread commits next.
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* gmem, uint32_t address_smem,
                                                             uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
      "r"(address_smem), "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's latest groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending of this thread's latest groups are not complete.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before those of the asynchronous proxy
// (bulk copies, wgmma) that follow.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders accesses to global memory in the same way.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace jax_flash::ptx
