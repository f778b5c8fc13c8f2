// Implements the forward pass of float8 operands (e4m3) with warpgroup-level matrix instructions.
//
//   for each tile of 128 keys and values that some row of the block may attend to
//     S = Q K^T                     products of stored numbers, registers of a warpgroup, 64 rows
//     P = e4m3(s / v 2^(x - m))     x = scale log2(e) (scale of Q) (scale of K) S; s: the scale of
//                                   the tile's V, v: the greatest scale of V in the head; m: the
//                                   row's running maximum, an integer
//     O = O 2^(m_old - m) + P V     P from registers
//     l = l 2^(m_old - m) + sum of 2^(x - m), before rounding
//   out = v O / l, lse = (m + log2 l) / log2(e)
//
// m begins as the row's greatest x + log2(s / v) in its first tile, rounded up, minus
// kFirstPeakLog2. Later tiles are not searched for greater ones: a sum of P beyond e4m3's greatest
// number reveals one. m then rises by an integer, and P is lowered by a power of two. Such a factor
// changes no rounding, unless P falls below 2^-6.
//
// Roles of warps. The first warp of the first warpgroup starts copies (TMA; plain bulk copies of V)
// and describes query tiles (producer.cuh). Two consumer warpgroups own 64 rows each
// (consumer.cuh). Blocks are persistent. They take query tiles in turn, in the order of
// sm90/forward/schedule.cuh, by a counter. The kernel that runs before this one clears the counter
// and transposes V (values.cuh). In long calls each unit has a block of its own.
//
// Map of dynamic shared memory (Float8Config, Float8Smem), from its start:
//
//   Q    [kQueryStages][kConsumers] tiles of 64 rows
//   K    [kStages] tiles of 128 rows
//   V    [kStages] tiles of kValueDim rows of 128 keys
//
// Static shared memory (Float8Notes) holds the full and empty barriers of each stage, the factors
// of each stage's keys, and the descriptions of query tiles.
#pragma once

#include <cstdint>

#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward_float8/config.cuh"
#include "sm90/forward_float8/consumer.cuh"
#include "sm90/forward_float8/plan.cuh"
#include "sm90/forward_float8/producer.cuh"

namespace jax_flash::sm90 {

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_float8_kernel(const __grid_constant__ Float8Plan plan,
                          const __grid_constant__ Float8Maps maps) {
  extern __shared__ __align__(1024) uint8_t tiles[];
  __shared__ Float8Notes<Config> notes;
  const Float8Smem<Config> smem(ptx::shared_address(tiles), notes);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(maps.query);
    ptx::prefetch_tensormap(maps.key);
    smem.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) Float8Producer<Config>{plan, maps, smem}.run();
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    Float8Consumer<Config>{plan, smem}.run();
  }
}

}  // namespace jax_flash::sm90
