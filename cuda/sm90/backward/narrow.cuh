// Computes the backward pass up to head dim 128, by warpgroup-level matrix instructions, after
// FlashAttention-3 (arXiv:2407.08608). So it does up to head dim 192 with values of at most 128
// columns; sm90/backward/pieces_consumer.cuh says what differs there.
//
//   for each query head of the group, for each tile of rows that may attend to the block's keys
//     S^T = K Q^T,  dP^T = V dO^T     registers of a warpgroup, 64 keys
//     P^T = 2^(scale log2(e) S^T - lse),  dS^T = P^T (dP^T - delta)
//     dV += P^T dO,  dK += dS^T Q     from registers; accumulators of the block
//     dQ = dS K                       dS from shared memory, both warpgroups' keys
//     dQ is added to float32 sums in global memory, by bulk copies from shared memory
//   dK, dV to global memory, by bulk copies from where dQ is staged before it is added
//
// Thread blocks are persistent and take one key block after the other: the first that is not yet
// taken, in an order that has long ones first. So the start of one key block overlaps the end of
// the one before. If some thread blocks would have nothing to do, they take part of the query tiles
// of other key blocks; and the query heads of a group may have key blocks of their own. The partial
// dK and dV are then added up: see sm90/backward/split.cuh.
//
// Warp roles: warp 0 starts copies (TMA) of K, V and, tile by tile, of Q with lse and of dO with
// delta. Warps 1 and 2 add dQ to the sums; in deterministic runs they also wait for the block's
// turn, so that no other warp has to. Warp 3 chooses the key blocks, writes zeros that later ones
// add to, and converts dQ of heads that are complete. Two consumer warpgroups own 64 keys each.
// They order their products such that exponentials overlap dP, dS overlaps dV, and the stores of dQ
// overlap dK and the next tile's S.
//
// Shared memory holds K, V; the descriptions of two key blocks; two stages each of Q, dO (with
// barriers full, empty) and dS^T; staged dQ, in the accumulators' fragment order; lse and delta of
// two tiles. With two stages of dS^T, one barrier of the consumers a tile is enough.
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

// Starts what depends on nothing else: the copies of the first K and V, the description of the
// first key block, and the copy of its first Q.
template <typename Config, bool kGeneral, bool kOrdered>
__device__ __forceinline__ void begin_blocks(const Backward& params, const BackwardMaps& maps,
                                             const KeyGradientMaps& gradient_maps,
                                             const BackwardWorkspace& workspace,
                                             const TileSchedule& schedule, TurnOrder order,
                                             const BlockPlan& plan,
                                             const BackwardSmem<Config>& smem) {
  constexpr bool kByMask = (kGeneral || Config::kHasMask) && !kOrdered;
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

// Computes dK, dV and the sums for dQ. kOrdered: blocks take turns to add dQ.
template <typename Config, typename Element, bool kGeneral, bool kOrdered>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ Backward params,
                    const __grid_constant__ BackwardMaps maps,
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
      ptx::griddepcontrol_wait();  // for the zeros
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
    // The consumers take turns to compute, so that one's products overlap the other's exponentials.
    if (Config::kAlternates && group == 1) {
      ptx::barrier_arrive(kMayCompute, Config::kConsumerThreads);
    }
    RingState<Config::kStages> ring;
    for_blocks(smem, [&](const BackwardBlock& block, uint32_t key_parity) {
      consume_tiles<Config, Element, kGeneral, !kOrdered>(params, gradient_maps, workspace, plan,
                                                          schedule.total_heads, smem, block, ring,
                                                          key_parity);
    });
    if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    if (Config::kAlternates && group == 0) {  // the other consumer's last turn
      ptx::barrier_sync(kMayCompute, Config::kConsumerThreads);
    }
  }
}

}  // namespace jax_flash::sm90
