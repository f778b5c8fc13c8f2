// Implements the forward pass of float32 operands with warpgroup-level matrix instructions of TF32.
//
//   for each tile of keys and values that some row of the block may attend to
//     S = Q K^T                                Q from registers or shared memory, 64 rows
//     P = 2^(scale log2(e) S - m)              m: the row's running maximum, in log2 units
//     O = O 2^(m_old - m) + P V                P from registers
//   out = O / l, lse = (m + log2 l) / log2(e)  l: the row's sum of P, before rounding
//
// With modifiers, S becomes logits before m is raised (sm90/float32_logits.cuh). Q, K, V and P
// are rounded to TF32, or split into two numbers of float16 (sm90/split_tiles.cuh); products are
// added in float32.
//
// Roles of warps. The first warp of the first warpgroup starts copies of K and V and describes
// query tiles (producer.cuh). Two consumer warpgroups own 64 rows each (consumer.cuh). Blocks are
// persistent. They take query tiles in turn, in the order of sm90/forward/schedule.cuh, by a
// counter. The kernel that runs before this one clears the counter, and writes the tiles of K and V
// (sm90/float32_tiles.cuh). In long calls each unit has a block of its own.
//
// Dynamic shared memory holds Q of each consumer if the head dim is above 128, or 64 if operands
// are split, then a ring of slots, which tiles of K and V take in turn. Static shared memory
// (Float32Notes) holds the full and empty barriers of each slot, and the descriptions of query
// tiles and key tiles.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward_float32/config.cuh"
#include "sm90/forward_float32/consumer.cuh"
#include "sm90/forward_float32/plan.cuh"
#include "sm90/forward_float32/producer.cuh"

namespace jax_flash::sm90 {

template <typename Config, uint32_t kModifiers>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_float32_kernel(const __grid_constant__ Float32Plan plan,
                           const __grid_constant__ Forward params) {
  extern __shared__ __align__(1024) uint8_t tiles[];
  __shared__ Float32Notes<Config> notes;
  static_assert(sizeof(notes) <= Config::kStaticBytes);
  const Float32Smem<Config> smem(ptx::shared_address(tiles), notes);
  if (threadIdx.x == 0) smem.init_barriers();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32)
      Float32Producer<Config, kModifiers != kNoModifier>{params, plan, smem}.run();
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Float32Consumer<Config, kModifiers>{params, plan, smem}.run();
  }
}

}  // namespace jax_flash::sm90
