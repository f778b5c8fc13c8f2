// Forward pass with warpgroup-level matrix instructions: FlashAttention-3 (arXiv:2407.08608).
//
//   for each tile of keys and values that some row of the block may attend to
//     S = Q K^T                     registers of a warpgroup, 64 rows
//     P = 2^(scale log2(e) S - m)   m the running reference of each row
//     O = O 2^(m_old - m) + P V     P from registers
//   out = O / l, lse = m + log l
//
// Warp roles. One warp starts copies (TMA) of Q, K and V; every consumer warpgroup owns 64 rows.
// It starts S of the next tile and O of this one together and computes the exponentials of the
// next tile beside the latter; warpgroups take turns in starting products, so that one's
// exponentials also run beside another's products. Blocks are persistent: while the consumers
// finish one query tile, the next one's operands are on their way.
//
// Shared memory: Q, two stages of K, two of V, each with a pair of barriers (full, empty).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/config.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/schedule.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/logits.cuh"
#include "tile/matmul.cuh"
#include "tile/modifiers.cuh"
#include "tile/segments.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, bool kGeneral>
__device__ __forceinline__ void produce(const Forward& params, const ForwardMaps& maps,
                                        const SegmentSpans& spans,
                                        const QueryTileSchedule& schedule,
                                        const ForwardSmem<Config>& smem) {
  const bool leader = threadIdx.x == 0;
  RingState<Config::kStages> key_stage, value_stage;
  RingState<Config::kQueryStages> query_stage;
  for (QueryTileCursor cursor{schedule}; cursor.valid(); cursor.advance()) {
    const QueryTileIndex q = cursor.index();
    const BatchIndex batch(params.shape, q.batch);
    const int32_t kv_head = q.head / (params.shape.heads / params.shape.kv_heads);
    const Band band(params, batch);
    const auto walk = walk_keys<Config, kGeneral>(params, band, spans, q);
    const auto load_key = [&](int32_t tile) {
      if (leader) {
        ptx::mbarrier_wait(smem.key_empty(key_stage.stage), key_stage.parity ^ 1);
        load_tile_boxes(smem.key(key_stage.stage), maps.key, smem.key_full(key_stage.stage),
                        params.key, batch, kv_head, tile * Config::kBlockKv);
      }
      key_stage.advance();
    };
    const auto load_value = [&](int32_t tile) {
      if (leader) {
        ptx::mbarrier_wait(smem.value_empty(value_stage.stage), value_stage.parity ^ 1);
        load_tile_boxes(smem.value(value_stage.stage), maps.value,
                        smem.value_full(value_stage.stage), params.value, batch, kv_head,
                        tile * Config::kBlockKv);
      }
      value_stage.advance();
    };
    if (walk.tile >= walk.end) continue;
    load_key(walk.tile);
    if (leader) {
      ptx::mbarrier_wait(smem.query_empty(query_stage.stage), query_stage.parity ^ 1);
      load_tile_boxes(smem.query(query_stage.stage), maps.query, smem.query_full(query_stage.stage),
                      params.query, batch, q.head, q.tile * Config::kBlockQ);
    }
    query_stage.advance();
    for (int32_t tile = walk.tile; tile < walk.end;) {
      const int32_t next = walk.skip_to(tile + 1);
      if (next < walk.end) load_key(next);
      load_value(tile);
      tile = next;
    }
  }
}

template <typename Config, typename Element, bool kGeneral>
__device__ __forceinline__ void consume(const Forward& params, const SegmentSpans& spans,
                                        const QueryTileSchedule& schedule,
                                        const ForwardSmem<Config>& smem) {
  constexpr int kN = Config::kBlockKv / 8, kOutN = Config::kValueDim / 8;
  constexpr int kHeadSteps = Config::kHeadDim / 16, kKeySteps = Config::kBlockKv / 16;
  using ScoreProduct = ptx::Wgmma<Element, Config::kBlockKv>;
  using OutProduct = ptx::Wgmma<Element, Config::kValueDim>;
  const int group = threadIdx.x / kWarpgroup - 1;  // of the consumers
  const int warp_row = group * 64 + threadIdx.x % kWarpgroup / 32 * 16;

  RingState<Config::kStages> key_stage, value_stage;
  uint32_t query_parity = 0;
  for (QueryTileCursor cursor{schedule}; cursor.valid(); cursor.advance()) {
    const QueryTileIndex q = cursor.index();
    const BatchIndex batch(params.shape, q.batch);
    const Band band(params, batch);
    const auto walk = walk_keys<Config, kGeneral>(params, band, spans, q);
    const int32_t row0 = q.tile * Config::kBlockQ, warp_row0 = row0 + warp_row;
    const int32_t row_end = min(row0 + Config::kBlockQ, band.q_len);
    const RowRange attended = {band.first_col(row0), band.end_col(row_end - 1)};
    if (walk.tile >= walk.end) {
      finish_empty_rows<Config, Element>(params, batch, q.head, warp_row0, band.q_len);
      continue;
    }

    float out[1][kOutN][4];
    int out_started = 0;
    OnlineSoftmax<1> softmax;
    const float to_log2 = kGeneral ? 1.0f : params.options.scale * kLog2E;

    float scores[1][kN][4];
    uint32_t probabilities[kKeySteps][4];
    float factor[1][2];
    uint32_t columns = 0;  // a bit per column of this thread: whether its warp attends to it

    // S = Q K^T
    const auto wait_key = [&] {
      ptx::mbarrier_wait(smem.key_full(key_stage.stage), key_stage.parity);
    };
    const auto start_scores = [&] {
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadSteps; ++k) {
        ScoreProduct::template ss<0, 0>(scores[0], descriptor_k_major(smem.query(0), group * 64, k),
                                        descriptor_k_major(smem.key(key_stage.stage), 0, k), k > 0);
      }
      ptx::wgmma_commit_group();
    };
    const auto release_key = [&] {
      arrive_warp(smem.key_empty(key_stage.stage));
      key_stage.advance();
    };
    // O += P V
    const auto start_out = [&](int32_t tile) {
      zero_unattended<Config>(smem.value(value_stage.stage), tile, attended, params.shape.kv_len);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
        OutProduct::template rs<1>(out[0], probabilities[k],
                                   descriptor_mn_major(smem.value(value_stage.stage), 0, k),
                                   k > 0 ? 1 : out_started);
      }
      ptx::wgmma_commit_group();
      out_started = 1;
    };
    const auto finish_out = [&] {
      ptx::wgmma_results(out[0]);
      arrive_warp(smem.value_empty(value_stage.stage));
      value_stage.advance();
    };
    // The exponentials are to run beside products under way, but the assembler likes to move them
    // behind the wait for those. So this wait precedes it, on a parity that depends on their sums
    // in a way that never matters: they are not negative. The vote keeps the loop uniform.
    const auto wait_value_after = [&](const auto& stage, float witness) {
      const uint32_t flip = __any_sync(0xffffffff, witness < 0.0f);
      ptx::mbarrier_wait(smem.value_full(stage.stage), stage.parity ^ flip);
    };
    // What the call does to logits; with modifiers they are in log2 units afterwards.
    const auto modify = [&](int32_t tile) {
      const int32_t col0 = tile * Config::kBlockKv, group_row0 = row0 + group * 64;
      if constexpr (kGeneral) {
        modify_scores(scores, LogitModifiers(params, batch, q.head), band, warp_row0, col0,
                      walk.one_segment(tile));
      }
      const int32_t valid_end = kGeneral ? group_row0 + 64 : min(group_row0 + 64, band.q_len);
      if (!band.all_allowed(group_row0, valid_end, col0, col0 + Config::kBlockKv) ||
          valid_end > band.q_len) {
        mask_band(scores, band, warp_row0, col0);
        if (kGeneral && valid_end > band.q_len) mask_rows(scores, band.q_len - warp_row0);
      }
      if constexpr (kGeneral) columns = attended_columns(scores);
    };
    const auto exponentials = [&](int32_t tile) {
#pragma unroll
      for (int n = 0; n < kN; ++n) softmax.exponentials(scores[0][n], 0, to_log2);
      if constexpr (kGeneral) {
        if (params.options.dropout_threshold != 0) {
          drop<kN>(scores, LogitModifiers(params, batch, q.head), warp_row0,
                   tile * Config::kBlockKv);
        }
      }
    };
    // Before the product of a tile of V that has arrived.
    const auto clear_value = [&](int32_t tile) {
      if constexpr (kGeneral) {
        clear_unattended<Config, Element>(smem.value(value_stage.stage), columns,
                                          LogitModifiers(params, batch, q.head), band, row0, tile);
      }
    };
    const auto convert = [&] {
#pragma unroll
      for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&block)[4] = scores[0][2 * k + i / 2];
          probabilities[k][i] = ptx::cvt_rn_x2<Element>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
        }
      }
    };

    // This warpgroup's own rows may need fewer tiles than the block's.
    const auto pass_over = [&](int32_t count) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        wait_key();
        release_key();
        ptx::mbarrier_wait(smem.value_full(value_stage.stage), value_stage.parity);
        arrive_warp(smem.value_empty(value_stage.stage));
        value_stage.advance();
      }
    };
    int32_t tile = walk.tile, own_end = walk.end;
    if constexpr (!kGeneral) {
      const int32_t group_row0 = row0 + group * 64;
      const TileRange own = kv_tiles<Config::kBlockKv>(band, group_row0, group_row0 + 64);
      // By reductions, whose results the compiler knows to be the same in all lanes.
      own_end = __reduce_min_sync(0xffffffff, min(own_end, own.end));
      const int32_t own_first = __reduce_max_sync(0xffffffff, max(tile, min(own.first, own_end)));
      pass_over(own_first - tile);
      tile = own_first;
    }

    ptx::mbarrier_wait(smem.query_full(0), query_parity);
    query_parity ^= 1;
    if (tile >= own_end) {
      arrive_warp(smem.query_empty(0));
      pass_over(walk.end - tile);
      finish_empty_rows<Config, Element>(params, batch, q.head, warp_row0, band.q_len);
      continue;
    }
    wait_key();
    start_scores();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(scores[0]);
    release_key();
    if constexpr (kGeneral) {
      // One copy of the modifiers' code: O of this tile and S of the next are under way together,
      // and another warpgroup's exponentials beside them.
      for (bool more = true; more;) {
        const int32_t next = walk.skip_to(tile + 1);
        more = next < walk.end;
        modify(tile);
        if (softmax.raise_reference<4>(scores, to_log2, factor) && out_started) {
          softmax.rescale(out, factor);
        }
        exponentials(tile);
        convert();
        ptx::mbarrier_wait(smem.value_full(value_stage.stage), value_stage.parity);
        clear_value(tile);
        start_out(tile);
        if (more) wait_key();
        start_scores();  // without a next tile, of what is there: nobody looks at it
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_results(scores[0]);
        finish_out();
        if (more) release_key();
        tile = next;
      }
      arrive_warp(smem.query_empty(0));
    } else {
      modify(tile);
      softmax.raise_reference<4>(scores, to_log2, factor);
      exponentials(tile);
      convert();
      ptx::mbarrier_wait(smem.value_full(value_stage.stage), value_stage.parity);
      for (int32_t next; (next = walk.skip_to(tile + 1)) < own_end; tile = next) {
        wait_key();
        start_scores();
        start_out(tile);
        ptx::wgmma_wait_group<1>();
        ptx::wgmma_results(scores[0]);
        if constexpr (Config::kOptimistic) {
          modify(next);
          bool rises = !softmax.ready() && softmax.raise_reference<4>(scores, to_log2, factor);
          float before[2] = {softmax.sum[0][0], softmax.sum[0][1]};
          softmax.sum[0][0] = softmax.sum[0][1] = 0.0f;
          exponentials(next);
          const float greatest = fmaxf(softmax.sum[0][0], softmax.sum[0][1]);
          softmax.sum[0][0] += before[0];
          softmax.sum[0][1] += before[1];
          wait_value_after(value_stage.next(), fminf(softmax.sum[0][0], softmax.sum[0][1]));
          ptx::wgmma_wait_group<0>();
          finish_out();
          if (__any_sync(0xffffffff, greatest > kOptimisticLimit)) {
            softmax.sum[0][0] = before[0];
            softmax.sum[0][1] = before[1];
            if (rises) softmax.rescale(out, factor);
            warp_scores<Config, Element>(scores, smem.query(0), smem.key(key_stage.stage),
                                         warp_row);
            modify(next);
            rises = softmax.raise_reference<4>(scores, to_log2, factor);
            exponentials(next);
          }
          release_key();
          convert();
          if (rises) softmax.rescale(out, factor);
        } else {
          release_key();
          modify(next);
          const bool rises = softmax.raise_reference<4>(scores, to_log2, factor);
          exponentials(next);
          wait_value_after(value_stage.next(), fminf(softmax.sum[0][0], softmax.sum[0][1]));
          ptx::wgmma_wait_group<0>();
          finish_out();
          convert();
          if (rises) softmax.rescale(out, factor);
        }
      }
      arrive_warp(smem.query_empty(0));
      start_out(tile);
      ptx::wgmma_wait_group<0>();
      finish_out();
      pass_over(walk.end - own_end);
    }
    finish_rows<Config, Element, kGeneral>(params, batch, band, q.head, warp_row0, softmax, to_log2,
                                           out);
  }
}

template <typename Config, typename Element, bool kGeneral>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ Forward params, const __grid_constant__ ForwardMaps maps,
                   const SegmentSpans spans, const QueryTileSchedule schedule) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  __shared__ __align__(8) uint64_t barriers[ForwardSmem<Config>::kBarriers];
  // Opaque, or the compiler converts the addresses anew wherever it needs them.
  ForwardSmem<Config> smem{ptx::shared_address(smem_bytes), ptx::shared_address(barriers)};
  asm volatile("" : "+r"(smem.root), "+r"(smem.barriers));

  if (threadIdx.x == 0) {
    smem.init_barriers();
    ptx::prefetch_tensormap(maps.query);
    ptx::prefetch_tensormap(maps.key);
    ptx::prefetch_tensormap(maps.value);
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x < 32) produce<Config, Element, kGeneral>(params, maps, spans, schedule, smem);
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    consume<Config, Element, kGeneral>(params, spans, schedule, smem);
  }
}

template <typename Config, typename Element, bool kGeneral>
Status launch_forward_config(const Forward& params, const SegmentSpans& spans,
                             cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t q_tiles = ceil_div(shape.q_len, Config::kBlockQ);
  const int64_t tiles = q_tiles * shape.heads * shape.batch;
  if (tiles == 0) return {};
  ForwardMaps maps;
  Status status = make_tensor_map("query", shape, params.query, shape.q_len, shape.heads,
                                  shape.head_dim, Config::kBlockQ, maps.query);
  if (status.ok()) {
    status = make_tensor_map("key", shape, params.key, shape.kv_len, shape.kv_heads, shape.head_dim,
                             Config::kBlockKv, maps.key);
  }
  if (status.ok()) {
    status = make_tensor_map("value", shape, params.value, shape.kv_len, shape.kv_heads,
                             shape.value_dim, Config::kBlockKv, maps.value);
  }
  if (!status.ok()) return status;
  int sms = 0;
  if (status = multiprocessors(sms); !status.ok()) return status;
  QueryTileSchedule schedule;
  schedule.q_tiles = static_cast<int32_t>(q_tiles);
  schedule.heads = shape.heads;
  schedule.total_heads = static_cast<int32_t>(shape.heads * shape.batch);
  schedule.paired = JAX_FLASH_SM90_PAIRED && params.options.is_causal && tiles > sms;
  return launch_kernel("sm90::forward_kernel", shape, forward_kernel<Config, Element, kGeneral>,
                       schedule.units() < sms ? schedule.units() : sms, Config::kThreads,
                       Config::kSmemBytes, stream, params, maps, spans, schedule);
}

// kHeadDim bounds head_dim and value_dim; a head dim of 192 comes mostly with a value dim of 128.
template <typename Element, int kHeadDim, bool kGeneral>
Status launch_forward(const Forward& params, cudaStream_t stream) {
  SegmentSpans spans;
  if (params.query_segment_ids) {
    spans = SegmentSpans::at(params.shape, params.workspace);
    const Status status = launch_segment_spans(params, spans, stream);
    if (!status.ok()) return status;
  }
  const auto launch = [&](auto config) {
    return launch_forward_config<decltype(config), Element, kGeneral>(params, spans, stream);
  };
  if constexpr (kGeneral) {  // two consumers have the registers
    constexpr int kBlockKv = kHeadDim == 256 ? 64 : kHeadDim == 192 ? 96 : 128;
    return launch(ForwardConfig<kHeadDim, kHeadDim, 2, kBlockKv>{});
  } else if constexpr (kHeadDim == 64) {
    if (tiles(params.shape, 192) < 132 || banded(params.options)) {
      return launch(ForwardConfig<64, 64, JAX_FLASH_SM90_CONSUMERS_64_BANDED,
                                  JAX_FLASH_SM90_BLOCK_KV_64_BANDED>{});
    }
    return launch(ForwardConfig<64, 64, JAX_FLASH_SM90_CONSUMERS_64, JAX_FLASH_SM90_BLOCK_KV_64>{});
  } else if constexpr (kHeadDim == 96) {
    return launch(ForwardConfig<96, 96, JAX_FLASH_SM90_CONSUMERS_96, JAX_FLASH_SM90_BLOCK_KV_96>{});
  } else if constexpr (kHeadDim == 128) {
    return launch(
        ForwardConfig<128, 128, JAX_FLASH_SM90_CONSUMERS_128, JAX_FLASH_SM90_BLOCK_KV_128>{});
  } else if constexpr (kHeadDim == 192) {
    if (params.shape.value_dim <= 128) return launch(ForwardConfig<192, 128, 2, 128>{});
    return launch(
        ForwardConfig<192, 192, JAX_FLASH_SM90_CONSUMERS_192, JAX_FLASH_SM90_BLOCK_KV_192>{});
  } else {
    return launch(
        ForwardConfig<256, 256, JAX_FLASH_SM90_CONSUMERS_256, JAX_FLASH_SM90_BLOCK_KV_256>{});
  }
}

}  // namespace jax_flash::sm90
