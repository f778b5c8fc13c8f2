// Implements the forward pass of float8 operands (e4m3) with warpgroup-level matrix instructions.
//
//   for each tile of 128 keys and values that some row of the block may attend to
//     S = Q K^T                     products of stored numbers, registers of a warpgroup, 64 rows
//     P = e4m3(s / v 2^(x - m))     x = scale log2(e) (scale of Q) (scale of K) S; s: the scale of
//                                   the tile's V, v: the greatest of the head; m: an integer
//     O = O 2^(m_old - m) + P V     P from registers
//     l = l 2^(m_old - m) + sum of 2^(x - m), before rounding
//   out = v O / l, lse = (m + log2 l) / log2(e)
//
// m begins as the row's greatest x in its first tile, rounded up, minus kFirstPeakLog2. Tiles after
// the first are not searched for greater logits: a sum of P beyond e4m3's greatest number shows
// one. Then m rises, and P is lowered, by a power of two. Rounding is relative to powers of two, so
// that m, an integer, changes no rounding unless P falls below 2^-6.
//
// Roles of warps. The first warpgroup's first warp starts copies (TMA, plain bulk copies of V) and
// describes query tiles (producer.cuh). Two consumer warpgroups own 64 rows each (consumer.cuh).
// Blocks are persistent, and take query tiles in turn, in the order of schedule.cuh of
// sm90/forward, by a counter that the kernel before this one has cleared. That one has also
// transposed V (values.cuh). In long calls each block has one query tile.
//
// Map of dynamic shared memory (Float8Config, Float8Smem), from its start:
//
//   Q    [kQueryStages][kConsumers] tiles of 64 rows
//   K    [kStages] tiles of 128 rows
//   V    [kStages] tiles of kValueDim rows of 128 keys
//
// Static shared memory has the barriers, full and empty for each stage, the factors of each tile of
// keys, and the descriptions of query tiles.
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
