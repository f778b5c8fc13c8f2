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
// Shared memory: Q, some stages of K and of V, each with a pair of barriers (full, empty).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/config.cuh"
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/schedule.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/segments.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

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

// A query tile after the other, their key tiles in one chain: a query tile's first scores and
// exponentials run beside the last product of the one before.
template <typename Config, typename Element>
__device__ __forceinline__ void consume_plain(const Forward& params,
                                              const QueryTileSchedule& schedule,
                                              const ForwardSmem<Config>& smem) {
  ForwardConsumer<Config, Element, false> consumer(params, smem);
  auto& work = consumer.work;
  QueryTileIndex unfinished;  // whose output is in registers, but for one product
  bool started = false;
  for (QueryTileCursor cursor{schedule}; cursor.valid(); cursor.advance()) {
    const QueryTileIndex current = cursor.index();
    work = QueryWork<Config, false>(params, SegmentSpans(), current);
    if (work.walk.tile >= work.walk.end) {
      finish_empty_rows<Config, Element>(params, work, consumer.warp_row);
      continue;
    }
    int32_t tile = work.walk.tile;
    consumer.wait_query();
    consumer.wait_key();
    consumer.start_scores();
    if (started) {
      const OnlineSoftmax<1> softmax = consumer.softmax;
      consumer.start_out();
      consumer.template first_tile<true>(tile);
      finish_rows<Config, Element, false>(params, unfinished, consumer.warp_row, softmax,
                                          consumer.to_log2, consumer.out);
      consumer.out_started = 0;
    } else {
      consumer.template first_tile<false>(tile);
      started = true;
    }
    unfinished = current;
    for (; !consumer.is_last(tile); ++tile) {
      consumer.clear_values(tile, work.attended);
      consumer.next_tile(tile + 1);
    }
    consumer.clear_values(tile, work.attended);
    if constexpr (Config::kQueryStages > 1) consumer.release_query();
  }
  if (!started) return;
  consumer.start_out();
  consumer.await_out();
  finish_rows<Config, Element, false>(params, unfinished, consumer.warp_row, consumer.softmax,
                                      consumer.to_log2, consumer.out);
}

// With one copy of the modifiers' code: O of a tile and S of the next are under way together, and
// another warpgroup's exponentials beside them.
template <typename Config, typename Element>
__device__ __forceinline__ void consume_general(const Forward& params, const SegmentSpans& spans,
                                                const QueryTileSchedule& schedule,
                                                const ForwardSmem<Config>& smem) {
  ForwardConsumer<Config, Element, true> consumer(params, smem);
  auto& work = consumer.work;
  for (QueryTileCursor cursor{schedule}; cursor.valid(); cursor.advance()) {
    const QueryTileIndex current = cursor.index();
    work = QueryWork<Config, true>(params, spans, current);
    if (work.walk.tile >= work.walk.end) {
      finish_empty_rows<Config, Element>(params, work, consumer.warp_row);
      continue;
    }
    int32_t tile = work.walk.tile;
    consumer.softmax = OnlineSoftmax<1>();
    consumer.out_started = 0;
    consumer.wait_query();
    consumer.wait_key();
    consumer.start_scores();
    consumer.template await_scores<0>();
    consumer.release_key();
    for (bool more = true; more;) {
      const int32_t next = work.walk.skip_to(tile + 1);
      more = next < work.walk.end;
      consumer.modify(tile);
      if (consumer.raise_reference() && consumer.out_started) consumer.rescale();
      consumer.exponentials(tile);
      consumer.convert();
      consumer.wait_value();
      consumer.clear_values(tile, work.attended);
      consumer.start_out();
      if (more) consumer.wait_key();
      consumer.start_scores();  // without a next tile, of what is there: nobody looks at it
      consumer.template await_scores<0>();
      consumer.await_out();
      if (more) consumer.release_key();
      tile = next;
    }
    consumer.release_query();
    finish_rows<Config, Element, true>(params, current, consumer.warp_row, consumer.softmax,
                                       consumer.to_log2, consumer.out);
  }
}

// For few query tiles: the warpgroups divide a tile's keys, and the first adds up their outputs.
template <typename Config, typename Element>
__device__ __forceinline__ void consume_split(const Forward& params,
                                              const QueryTileSchedule& schedule,
                                              const ForwardSmem<Config>& smem) {
  static_assert(Config::kConsumers == 2);
  constexpr int kThreads = Config::kConsumers * kWarpgroup;
  ForwardConsumer<Config, Element, false> consumer(params, smem);
  auto& work = consumer.work;
  const int group = __shfl_sync(0xffffffff, consumer.group, 0);
  RingState<Config::kStages> stage;  // of the query tile's first key tile
  bool partial_used = false;
  for (QueryTileCursor cursor{schedule}; cursor.valid(); cursor.advance()) {
    const QueryTileIndex current = cursor.index();
    work = QueryWork<Config, false>(params, SegmentSpans(), current);
    if (work.walk.tile >= work.walk.end) {
      if (group == 0) finish_empty_rows<Config, Element>(params, work, consumer.warp_row);
      continue;
    }
    // Every other tile, from this warpgroup's first on.
    int32_t tile = work.walk.tile + group;
    consumer.key_stage = consumer.value_stage = stage;
    consumer.key_stage.advance(group);
    consumer.value_stage.advance(group);
    stage.advance(work.walk.end - work.walk.tile);
    consumer.softmax = OnlineSoftmax<1>();
    consumer.out_started = 0;
    consumer.wait_query();
    if (tile < work.walk.end) {
      consumer.wait_key();
      consumer.start_scores();
      consumer.template first_tile<false>(tile);
      for (; !consumer.is_last(tile); tile += Config::kTileStep) {
        consumer.clear_values(tile, work.attended);
        consumer.next_tile(tile + Config::kTileStep);
      }
      consumer.clear_values(tile, work.attended);
      consumer.start_out();
      consumer.await_out();
    }
    consumer.release_query();
    if (group == 1) {
      if (partial_used) ptx::barrier_sync(kPartialEmpty, kThreads);
      store_partial(smem, consumer.softmax, consumer.out, consumer.out_started != 0);
      ptx::barrier_arrive(kPartialFull, kThreads);
    } else {
      ptx::barrier_sync(kPartialFull, kThreads);
      add_partial(smem, consumer.to_log2, consumer.softmax, consumer.out);
      ptx::barrier_arrive(kPartialEmpty, kThreads);
      finish_rows<Config, Element, false>(params, current, consumer.warp_row, consumer.softmax,
                                          consumer.to_log2, consumer.out);
    }
    partial_used = true;
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
    if constexpr (kGeneral) {
      consume_general<Config, Element>(params, spans, schedule, smem);
    } else if constexpr (Config::kSplitKeys) {
      consume_split<Config, Element>(params, schedule, smem);
    } else {
      consume_plain<Config, Element>(params, schedule, smem);
    }
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
    int sms = 0;
    if (const Status status = multiprocessors(sms); !status.ok()) return status;
    // In pairs (QueryTileSchedule) if the tiles differ in length.
    if (JAX_FLASH_SM90_SPLIT_KEYS &&
        tiles(params.shape, 64) <= (params.options.is_causal ? 2 : 1) * sms) {
      return launch(ForwardConfig<64, 64, 2, JAX_FLASH_SM90_BLOCK_KV_64_BANDED, true>{});
    }
    if (tiles(params.shape, 192) < sms || banded(params.options)) {
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
