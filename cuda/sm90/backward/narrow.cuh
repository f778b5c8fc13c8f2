// Computes the backward pass for head dims up to 128 with warpgroup products (wgmma), after
// FlashAttention-3 (arXiv:2407.08608). Head dims up to 192 with values of at most 128 columns use
// the same kernel with other consumers: see sm90/backward/pieces_consumer.cuh.
//
// A thread block owns a tile of 128 keys, its key block. With lse in log2 units:
//
//   for each query head of the group, for each tile of rows that may attend to the block's keys
//     S^T = K Q^T,  dP^T = V dO^T     registers of a warpgroup, 64 keys
//     P^T = 2^(scale log2(e) S^T - lse),  dS^T = P^T (dP^T - delta)
//     dV += P^T dO,  dK += dS^T Q     from registers; accumulators of the block
//     dQ = dS K                       dS from shared memory, both warpgroups' keys
//     bulk copies add dQ, staged in shared memory, to float32 sums in global memory
//   bulk copies store dK and dV, staged in the memory of dQ, to global memory
//
// Thread blocks are persistent. Each takes the first key block that is not yet taken, in an order
// that has long ones first; deterministic runs fix the order in advance. The start of one key block
// overlaps the end of the one before. If some thread blocks would be idle, they take part of the
// query tiles of other key blocks. The query heads of a group may also have separate key blocks. In
// both cases, partial dK and dV are added up: see sm90/backward/split.cuh.
//
// Warp roles:
//   warp 0       starts copies (TMA) of K, V and, tile by tile, of Q with lse and of dO with delta
//   warps 1, 2   add dQ of one consumer each to the sums; in deterministic runs, they also wait for
//                the block's turn, so that no other warp has to
//   warp 3       chooses the key blocks, zeroes sums that later key blocks add to, and converts dQ
//                of complete heads to the operands' type
//   warps 4-11   two consumer warpgroups of 64 keys each; sm90/backward/narrow_consumer.cuh has the
//                order of their steps
//
// Shared memory, with the offsets in sm90/backward/config.cuh:
//   K, V                     of the current key block; barriers full of each, empty of both
//   Q with lse, 2 stages     barriers full and empty
//   dO with delta, 2 stages  barriers full and empty
//   dS^T, 2 stages           of both consumers; with two stages, they synchronize once a tile
//   dQ, 2 stages each        a consumer's dQ, in the accumulators' fragment order
//   a bias, 1 or 2 stages    of 64 query rows; then there is one stage of dQ
//   block descriptions, 2    the current key block and the next
#pragma once

#include <cuda.h>

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/dquery.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/pieces_consumer.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/ring.cuh"

namespace jax_flash::sm90 {

// Starts the work that needs no earlier result: copies K and V of the first key block, describes
// that block, and copies its first Q.
template <typename Config, bool kGeneral, bool kOrdered>
__device__ __forceinline__ void begin_blocks(const Backward& params, const BackwardMaps& maps,
                                             const KeyGradientMaps& gradient_maps,
                                             const BackwardWorkspace& workspace,
                                             const TileSchedule& schedule, TurnOrder order,
                                             const BlockPlan& plan,
                                             const BackwardSmem<Config>& smem) {
  constexpr bool kByMask = Config::kSkipsByMask && !kOrdered;
  if (threadIdx.x < 32) {
    smem.init_barriers();
    if (threadIdx.x == 0) load_first_keys(params, plan, schedule, maps, smem);
  } else if (threadIdx.x < 64) {
    if (threadIdx.x == 32) {
      for (const CUtensorMap* map : {&maps.key, &maps.query, &maps.value, &maps.dout,
                                     &gradient_maps.dkey, &gradient_maps.dvalue}) {
        ptx::prefetch_tensormap(*map);
      }
    }
  } else if (threadIdx.x >= 128) {
    touch_parameters<Config::kConsumers * 4>(params, threadIdx.x / 32 - 4);
    touch_parameters(plan);
    touch_parameters(schedule);
    fill_statistics(workspace, smem);
  } else if (threadIdx.x >= 96) {
    auto block = BackwardBlock::at < Config, kGeneral || Config::kHasSegments,
         kByMask > (params, plan, schedule, plan.split.block_of(static_cast<int32_t>(blockIdx.x)),
                    workspace.spans, order);
    if constexpr (!kOrdered) {
      int32_t left = 0;
      divide<!kGeneral>(plan.split, static_cast<int32_t>(blockIdx.x), left, block);
    }
    if (threadIdx.x == 96) smem.blocks[0] = block;
  }
  __syncthreads();
  if (threadIdx.x == 96) {
    const BackwardBlock& block = smem.blocks[0];
    if (block.tile_count > 0) {
      load_query(params, maps, workspace, smem, 0, block, block.walk.begin());
    }
    ptx::mbarrier_arrive(smem.block_full(0));
  }
}

// Computes dK, dV and the sums for dQ. kOrdered: blocks add dQ in turns (deterministic runs).
template <typename Config, typename Element, bool kGeneral, bool kOrdered>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ Backward params,
                    const __grid_constant__ BackwardMapsOf<Config> maps,
                    const __grid_constant__ KeyGradientMaps gradient_maps,
                    const BackwardWorkspace workspace,
                    const __grid_constant__ TileSchedule schedule, const TurnOrder turns,
                    const __grid_constant__ BlockPlan plan) {
  const TurnOrder order = kOrdered ? turns : TurnOrder::kNone;
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(128) float statistics_smem[2][Config::kStages * Config::kBlockQ];
  __shared__ __align__(8) uint64_t barriers_smem[BackwardSmem<Config>::kBarriers];
  __shared__ int2 tile_indices_smem[Config::kStages];
  __shared__ __align__(16) uint8_t block_bytes_smem[2 * sizeof(BackwardBlock)];
  const BackwardSmem<Config> smem{ptx::shared_address(tiles_smem),
                                  ptx::shared_address(barriers_smem),
                                  statistics_smem[0],
                                  statistics_smem[1],
                                  tile_indices_smem,
                                  reinterpret_cast<BackwardBlock*>(block_bytes_smem)};
  begin_blocks<Config, kGeneral, kOrdered>(params, maps, gradient_maps, workspace, schedule, order,
                                           plan, smem);
  ptx::griddepcontrol_launch_dependents();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) {
      StagePair next;
      bool begun = true;
      for_blocks(smem, [&](const BackwardBlock& block, uint32_t key_parity) {
        load_tiles<true, kOrdered>(params, maps, workspace, smem, block, begun, key_parity, next);
        begun = false;
      });
    } else if (threadIdx.x < 96) {
      ptx::griddepcontrol_wait();  // for zeroed sums
      StagePair next;
      for_blocks(smem, [&](const BackwardBlock& block, uint32_t) {
        if constexpr (Config::kInPieces) {
          add_dquery_in_pieces(params, workspace, smem, plan, schedule.tiles, schedule.total_heads,
                               block, threadIdx.x / 32 - 1);
        } else {
          add_dquery<kOrdered>(params, workspace, smem, plan, schedule.tiles, schedule.total_heads,
                               block, threadIdx.x / 32 - 1, next);
        }
      });
    } else {
      choose_blocks<Config, Element, kGeneral, kOrdered>(params, maps, plan, workspace, schedule,
                                                         order, smem);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1;
    // The consumers compute exponentials in turn, so that the products of one overlap the
    // exponentials of the other.
    if (Config::kEarlyDvalue && group == 1) {
      ptx::barrier_arrive(kMayCompute, Config::kConsumerThreads);
    }
    RingState<Config::kStages> ring;
    for_blocks(smem, [&](const BackwardBlock& block, uint32_t key_parity) {
      consume_tiles<Config, Element, kGeneral, !kOrdered>(params, gradient_maps, workspace, plan,
                                                          schedule.total_heads, smem, block, ring,
                                                          key_parity);
    });
    if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    if (Config::kEarlyDvalue && group == 0) {  // matches the other's last arrival
      ptx::barrier_sync(kMayCompute, Config::kConsumerThreads);
    }
  }
}

}  // namespace jax_flash::sm90
