// Computes the backward pass up to head dim 128, by warpgroup-level matrix instructions, after
// FlashAttention-3 (arXiv:2407.08608).
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
// of other key blocks, and the partial dK and dV are then added up: see sm90/backward/split.cuh.
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

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/score_gradient.cuh"
#include "modifiers/score_gradient_transposed.cuh"
#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/parts.cuh"
#include "sm90/backward/pipeline.cuh"
#include "tile/bad_key_rows.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/quad.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Computes one key block's dK and dV, and stages dQ of each of its query tiles, as a consumer.
template <typename Config, typename Element, bool kGeneral, bool kMaySplit>
__device__ __forceinline__ void consume_tiles(
    const Backward& params, const KeyGradientMaps& maps, const BackwardWorkspace& workspace,
    const BlockPlan& plan, const BackwardSmem<Config>& smem, const BackwardBlock& block,
    RingState<Config::kStages>& ring, uint32_t key_parity) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv;
  constexpr bool kManyRegisters = Config::kHeadDim <= 96;  // chosen by measurement
  constexpr bool kScaled = kScaledDlogits<Element>;
  constexpr int kHalves = kBlockQ / 64;  // a tile's rows are worked on 64 at a time
  constexpr int kHeadN = Config::kHeadDim / 8, kHeadSteps = Config::kHeadDim / 16;
  using ScoreProduct = ptx::Wgmma<Element, 64>;
  using KeyProduct = ptx::Wgmma<Element, Config::kHeadDim>;
  using DqueryProduct = ptx::Wgmma<Element, 64>;
  const Shape& shape = params.shape;
  const Band& band = block.band;  // read again whenever needed: registers are short
  const auto first_key = [&] { return block.kv_tile * kBlockKv; };
  // The shuffle makes it uniform in the warp for the compiler, so that descriptors use uniform
  // registers.
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1;
  const int thread = kept_thread_index();
  const int warp_key = group * 64 + threadIdx.x % 128 / 32 * 16;
  const int dquery_row = Config::kDqueryByRows ? group * 64 : 0;
  const int dquery_col = Config::kDqueryByRows ? 0 : group * 64;
  const float to_log2 = params.options.scale * kLog2E;

  float dkey[kHeadN][4], dvalue[kHeadN][4];
  clear(dkey);
  clear(dvalue);
  // dK and dV are stored from the memory that stages dQ, by bulk copies of one thread a consumer.
  const bool copies = threadIdx.x % 128 == 0;
  const auto await_copies = [&] {
    if (copies) ptx::cp_async_bulk_wait_group_read<0>();
    ptx::barrier_sync(kBackwardZeroed + group, 128);
  };
  const auto write_key_gradients = [&] {
    const typename Config::GradientTile dkey_smem{smem.staging(group * 2), 0};
    const typename Config::GradientTile dvalue_smem{smem.staging(group * 2 + 1), 0};
    const int row = threadIdx.x % 128 / 32 * 16;
    store_sums<Element>(dkey_smem, row, kScaled ? 1.0f : params.options.scale, dkey);
    store_sums<Element>(dvalue_smem, row, 1.0f, dvalue);
    ptx::barrier_sync(kBackwardZeroed + group, 128);
    const int32_t row0 = first_key() + group * 64;
    // A single row has no axis in the maps, and any index would address that row.
    if (!copies || row0 >= shape.kv_len) return;
    ptx::fence_proxy_async_shared();
    store_tile_panels(dkey_smem, maps.dkey, params.dkey, block.batch, block.kv_head, row0);
    store_tile_panels(dvalue_smem, maps.dvalue, params.dvalue, block.batch, block.kv_head, row0);
    ptx::cp_async_bulk_commit_group();
  };
  // Exchanges the sums of a divided key block; true if another thread block writes them.
  const auto exchange_sums = [&] {
    if constexpr (!kMaySplit) return false;
    const SplitSums sums{workspace.split_sums,
                         BackwardCounters{workspace.counters, plan.ends.kv_heads}.stored(), group,
                         kBackwardZeroed + group};
    const int32_t index = __reduce_max_sync(0xffffffff, block.sum.index);
    const int32_t addends = __reduce_max_sync(0xffffffff, block.sum.addends);
    if (addends < 0) {
      sums.store(index, dkey, dvalue);
      return true;
    }
    for (int32_t i = index - addends; i < index; ++i) sums.add(i, dkey, dvalue);
    return false;
  };
  // The maxima make these uniform for the compiler. They are not read from shared memory again, nor
  // is anything else that the loop can keep: such reads wait behind products, too.
  const int tile_count = __reduce_max_sync(0xffffffff, block.tile_count);
  const int32_t group_key = first_key() + group * 64;
  const auto unmasked = band.template unmasked_tiles<64>(group_key, group_key + 64);
  const int32_t first_unmasked = __reduce_max_sync(0xffffffff, unmasked.first);
  const int32_t last_unmasked = __reduce_max_sync(0xffffffff, unmasked.last);
  if (tile_count == 0) {
    // Arrives only after the copying warp has seen the phase before end: it would miss that
    // otherwise.
    ptx::mbarrier_wait(smem.key_full(), key_parity);
    ptx::mbarrier_wait(smem.value_full(), key_parity);
    arrive_by_warp(smem.keys_empty());
    await_copies();
    write_key_gradients();
    return;
  }
  ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
  int2 tile = smem.tiles[ring.stage];

  // Zeroes keys and values that no row may attend to.
  __shared__ uint32_t bad_keys_smem[kGeneral ? kBlockKv / 32 + 1 : 1];
  const int32_t first = max(0, band.lo) - first_key();
  const int32_t end = min(band.kv_len, band.q_len - 1 + band.hi) - first_key();
  const bool has_unattended = first > 0 || (end < kBlockKv && first_key() + end < shape.kv_len);
  ptx::mbarrier_wait(smem.key_full(), key_parity);
  if (has_unattended) zero_rows<Config::kConsumerThreads>(smem.key(), first, end, kConsumers);
  if constexpr (kGeneral) {
    clear_bad_key_rows<Config::kConsumerThreads, kConsumers, Element>(smem.key(), bad_keys_smem);
  }
  // Zeroes the rows of a tile that are beyond the end of the sequence, once it has arrived. The
  // copy engine zeroes rows that are beyond the operand.
  const bool has_padding = kGeneral || band.q_len < shape.q_len;
  const auto zero_padding = [&](const typename Config::QueryTile& rows_smem, int32_t row0) {
    if (has_padding && row0 + kBlockQ > band.q_len) {
      zero_rows(rows_smem, 0, band.q_len - row0, kBackwardZeroed + group);
    }
  };
  uint32_t key_rmem[kHeadSteps][4], value_rmem[kHeadSteps][4];
  // Multiplies a of 64 keys by b^T of 64 query rows.
  const auto start_scores = [&](float (&d)[8][4], const typename Config::KeyTile& a,
                                const uint32_t (&a_rmem)[kHeadSteps][4],
                                const typename Config::QueryTile& b, int half) {
    forget(d);
    const auto a_rows = unknown_address(a);
    const auto b_rows = unknown_address(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSteps; ++k) {
      if constexpr (Config::kKeysInRegisters) {
        ScoreProduct::template rs<0>(d, a_rmem[k], operand_k_major(b_rows, half * 64, k), k > 0);
      } else {
        ScoreProduct::template ss<0, 0>(d, operand_k_major(a_rows, group * 64, k),
                                        operand_k_major(b_rows, half * 64, k), k > 0);
      }
    }
    ptx::wgmma_commit_group();
  };
  // Adds a of 64 keys times b of 64 query rows to a sum.
  const auto start_sum = [&](float (&sum)[kHeadN][4], const uint32_t (&a)[4][4],
                             const typename Config::QueryTile& b, int half) {
    const auto b_rows = unknown_address(b);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      KeyProduct::template rs<1>(sum, a[k], operand_mn_major(b_rows, 0, half * 4 + k), 1);
    }
    ptx::wgmma_commit_group();
  };

  // Fetches what modifies the next 64 rows, if there are registers: the mask to registers, a bias
  // to L2.
  TransposedMask mask;
  const bool reads_mask = kGeneral && kManyRegisters && plan.reads_mask_by_rows;
  const auto read_ahead = [&](int half) {
    if constexpr (kGeneral && kManyRegisters) {
      const int32_t key = first_key() + warp_key, row = tile.x + half * 64;
      if (key >= shape.kv_len) return;
      if (reads_mask) {
        mask.load(block.batch.pointer<const uint8_t>(params.mask, tile.y) + key, params.mask.row,
                  row, shape.q_len);
      }
      if (params.bias) prefetch_bias(params, block.batch, tile.y, row, key);
    }
  };

  float scores[8][4], dscores[8][4], dquery[8][4];
  read_ahead(0);
  zero_padding(smem.query(ring.stage), tile.x);
  if constexpr (Config::kKeysInRegisters) load_fragments(key_rmem, smem.key(), warp_key);
  if constexpr (Config::kNextScoresFirst) {
    start_scores(scores, smem.key(), key_rmem, smem.query(ring.stage), 0);
  }
  await_copies();
  ptx::mbarrier_wait(smem.value_full(), key_parity);
  if (has_unattended) zero_rows<Config::kConsumerThreads>(smem.value(), first, end, kConsumers);
  if constexpr (Config::kKeysInRegisters) load_fragments(value_rmem, smem.value(), warp_key);
  if constexpr (Config::kNextScoresFirst) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(scores);
  }
  // Computes dQ of the tile before, whose dS^T is in the other stage. Before the first tile it
  // computes dQ of whatever is there and discards it: a branch around it would make the compiler
  // wait.
  int tiles_done = 0;
  const auto await_scores = [&](uint32_t stage) {
    if (tiles_done > 0) {
      ptx::barrier_sync(kScoresStored + (group ^ 1) * 2 + stage, Config::kConsumerThreads);
    }
    ptx::fence_proxy_async_shared();  // also without a tile before: saves a branch
  };
  const auto start_dquery = [&](uint32_t stage) {
    forget(dquery);
    const auto a = unknown_address(smem.score(stage));
    const auto b = unknown_address(smem.key());
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockKv / 16; ++k) {
      DqueryProduct::template ss<1, 1>(dquery, operand_mn_major(a, dquery_row, k),
                                       operand_mn_major(b, dquery_col, k), k > 0);
    }
    ptx::wgmma_commit_group();
  };
  const auto stage_dquery = [&](uint32_t stage, uint32_t empty_parity) {
    ptx::wgmma_results(dquery);
    if (tiles_done == 0) return;
    ptx::mbarrier_wait(smem.dquery_empty(group, stage), empty_parity);
    stage_accumulators(smem.staging(group * 2 + stage), dquery, thread % 128);
    ptx::barrier_arrive(kDqueryFull + group * 2 + stage, 128 + 32);
  };

  do {
    const int32_t row0 = tile.x;
    const uint32_t stage = ring.stage;
    if constexpr (!Config::kNextScoresFirst) {
      start_scores(scores, smem.key(), key_rmem, smem.query(stage), 0);
    }
    ptx::mbarrier_wait(smem.dout_full(stage), ring.parity);
    zero_padding(smem.dout(stage), row0);
    start_scores(dscores, smem.value(), value_rmem, smem.dout(stage), 0);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      CapSlopes<8> slopes;
      uint32_t mask_bits = 0;
      if (reads_mask) mask_bits = mask.bits();
      if (half + 1 < kHalves) read_ahead(half + 1);
      const TransposedGradient<kGeneral, 8, kManyRegisters, kScaled> gradient{
          params,           block.batch, tile.y,   first_key() + warp_key,
          row0 + half * 64, reads_mask,  mask_bits};
      const float* lse_smem = smem.lse + stage * kBlockQ + half * 64;
      const float* delta_smem = smem.delta + stage * kBlockQ + half * 64;
      const typename Config::LseColumns lse(lse_smem);
      // P^T, overlapped with dP^T; dV += P^T dO
      if (!Config::kNextScoresFirst || half > 0) {
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_results(scores);
      }
      if constexpr (kGeneral) mark_bad_key_rows<kBlockKv>(scores, bad_keys_smem, warp_key);
      const int32_t half_row = row0 + half * 64;
      if (kGeneral || half_row < first_unmasked || half_row > last_unmasked) {
        gradient.mask(scores, band, kManyRegisters ? &slopes : nullptr);
      }
      if (Config::kEarlyDquery && half == 0) {
        await_scores(stage ^ 1);
        start_dquery(stage ^ 1);
      }
      uint32_t kept[2][1], probabilities[4][4], rounded[4][4];
      gradient.draw(kept);
      if constexpr (Config::kAlternates) {
        ptx::barrier_sync(kMayCompute + group, Config::kConsumerThreads);
      }
      gradient.probabilities(scores, lse, lse_smem, to_log2);
      if constexpr (Config::kEarlyDvalue) {
        round_fragments<Element>(probabilities, scores);
        if constexpr (Config::kAlternates) {
          ptx::wgmma_fence();  // else exponentials sink below what follows
          ptx::barrier_arrive(kMayCompute + (group ^ 1), Config::kConsumerThreads);
        }
        start_sum(dvalue, probabilities, smem.dout(stage), half);
      }

      // dS^T, overlapped with dV; dK += dS^T Q
      if (Config::kEarlyDquery && half == 0) {
        ptx::wgmma_wait_group<1 + Config::kEarlyDvalue>();
      } else {
        ptx::wgmma_wait_group<Config::kEarlyDvalue>();
      }
      ptx::wgmma_results(dscores);
      gradient.finish(scores, dscores, lse_smem, delta_smem, kept,
                      kManyRegisters ? &slopes : nullptr);
      if constexpr (!Config::kEarlyDvalue) {
        gradient.drop(scores, kept);
        round_fragments<Element>(probabilities, scores);
        start_sum(dvalue, probabilities, smem.dout(stage), half);
      }
      round_fragments<Element>(rounded, dscores);
      if (!Config::kEarlyDquery && half == 0) {
        await_scores(stage ^ 1);
        start_dquery(stage ^ 1);
      }
      start_sum(dkey, rounded, smem.query(stage), half);
      store_rounded(smem.score(stage), warp_key, half, rounded, thread % 32);
      if (half + 1 < kHalves) {
        start_scores(scores, smem.key(), key_rmem, smem.query(stage), half + 1);
        if (half == 0) {
          ptx::wgmma_wait_group<2>();
          stage_dquery(stage ^ 1, ring.parity ^ stage);
        }
        start_scores(dscores, smem.value(), value_rmem, smem.dout(stage), half + 1);
      }
    }

    // Starts the next tile's S^T; after the last tile it recomputes that of an old stage and
    // discards it.
    ring.advance();
    if (tiles_done + 1 < tile_count) {
      ptx::mbarrier_wait(smem.query_full(ring.stage), ring.parity);
      tile = smem.tiles[ring.stage];
      read_ahead(0);
      zero_padding(smem.query(ring.stage), tile.x);
    }
    if constexpr (Config::kNextScoresFirst) {
      start_scores(scores, smem.key(), key_rmem, smem.query(ring.stage), 0);
    }
    ptx::wgmma_wait_group<1 + Config::kNextScoresFirst>();
    if constexpr (kHalves == 1) stage_dquery(ring.stage, ring.parity);
    arrive_by_warp(smem.dout_empty(stage));
    ptx::barrier_arrive(kScoresStored + group * 2 + stage, Config::kConsumerThreads);
    ++tiles_done;
    ptx::wgmma_wait_group<0>();
    if constexpr (Config::kNextScoresFirst) ptx::wgmma_results(scores);
    ptx::wgmma_results(dkey);
    ptx::wgmma_results(dvalue);
    arrive_by_warp(smem.query_empty(stage));
  } while (tiles_done < tile_count);
  await_scores(ring.stage ^ 1);
  start_dquery(ring.stage ^ 1);
  ptx::wgmma_wait_group<0>();
  arrive_by_warp(smem.keys_empty());
  stage_dquery(ring.stage ^ 1, ring.parity ^ ring.stage);
  // Waits until dQ of the last two tiles has been copied from there.
  ptx::mbarrier_wait(smem.dquery_empty(group, ring.stage), ring.parity ^ 1);
  ptx::mbarrier_wait(smem.dquery_empty(group, ring.stage ^ 1), ring.parity ^ ring.stage ^ 1);
  if (!exchange_sums()) write_key_gradients();
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
  constexpr bool kByMask = kGeneral && !kOrdered;
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
  // Starts what depends on nothing else: the copies of the first K and V, and the description of
  // the first key block.
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
    auto block = BackwardBlock::at<Config, kGeneral, kByMask>(
        params, plan, schedule, plan.split.block_of(static_cast<int32_t>(blockIdx.x)),
        workspace.spans, order);
    if constexpr (!kGeneral && !kOrdered) {
      int32_t left = 0;
      divide(plan.split, static_cast<int32_t>(blockIdx.x), left, block);
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
        add_dquery<kOrdered>(params, workspace, smem, plan, schedule.tiles, block,
                             threadIdx.x / 32 - 1, next);
      });
    } else {
      choose_blocks<Config, Element, kGeneral, kOrdered>(params, plan, workspace, schedule, order,
                                                         smem);
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
      consume_tiles<Config, Element, kGeneral, !kGeneral && !kOrdered>(
          params, gradient_maps, workspace, plan, smem, block, ring, key_parity);
    });
    if (threadIdx.x % 128 == 0) ptx::cp_async_bulk_wait_group_read<0>();
    if (Config::kAlternates && group == 0) {  // the other consumer's last turn
      ptx::barrier_sync(kMayCompute, Config::kConsumerThreads);
    }
  }
}

}  // namespace jax_flash::sm90
