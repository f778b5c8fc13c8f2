// Implements the forward pass with warpgroup-level matrix instructions: FlashAttention-3
// (arXiv:2407.08608).
//
//   for each tile of keys and values that some row of the block may attend to
//     S = Q K^T                     registers of a warpgroup, 64 rows
//     P = 2^(scale log2(e) S - m)   m the running maximum of each row
//     O = O 2^(m_old - m) + P V     P from registers
//   out = O / l, lse = m + log l
//
// Warp roles. One warp starts copies (TMA) of K and V. For each consumer, another warp copies its Q
// and bias, and describes the query tile to it; or one warp does so for all consumers, if two
// others convert values (sm90/forward/values.cuh). With segments, the last warp plans one query
// tile ahead (sm90/forward/segments.cuh). Every consumer warpgroup owns 64 rows: it starts S of a
// tile and O of the one before, and computes the tile's exponentials overlapped with the latter.
// Blocks are persistent, unless query tiles are very long, and the chain continues over query
// tiles: the first scores of one overlap the last product of the one before. If there are registers
// for more scores, S is computed a tile ahead instead (sm90/forward/order_ahead.cuh). If there are
// very few query tiles, two warpgroups share each, and divide its keys. plan/choose.cc decides
// which call takes what.
//
// Shared memory holds Q and some stages of K and of V, each with a pair of barriers (full, empty).
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/segments.cuh"
#include "params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/bias_step.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/half_values.cuh"
#include "sm90/forward/order_ahead.cuh"
#include "sm90/forward/order_split_keys.cuh"
#include "sm90/forward/order_window.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plain_step.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/producer.cuh"
#include "sm90/forward/segments.cuh"
#include "sm90/forward/step.cuh"
#include "sm90/forward/values.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Processes a query tile's keys again, one step after the other, without overlap.
template <typename Config, typename Consumer>
__device__ __forceinline__ void attend_again(Consumer& consumer) {
  consumer.softmax = OnlineSoftmax<1>();
  consumer.by_bits = false;
  consumer.out_started = 0;
  for (int32_t index = consumer.work.tile; index < consumer.work.end; ++index) {
    const int32_t tile = Config::kScoresAhead ? tile_from_end(consumer.work.end, index) : index;
    consumer.wait_key();
    consumer.start_scores();
    if (index == consumer.work.tile) consumer.read_description();
    consumer.template await_scores<0>();
    consumer.release_key();
    consumer.modify(consumer.scores, tile, consumer.at_edge(tile));
    const bool rises = raise_references<false, false>(consumer.softmax, consumer.scores,
                                                      consumer.to_log2, consumer.factor);
    consumer.exponentials();
    consumer.convert();
    consumer.wait_value();
    const RowRange attended = consumer.work.attended;
    consumer.clear_values(turned_tile<Config, kNoModifier>(tile, attended), attended);
    if (rises && consumer.out_started) consumer.rescale();
    consumer.start_out();
    consumer.await_out();
  }
}

// Redoes the query tiles for which some consumer warp of the block could not trust its sums or its
// values. All warps have signaled by now.
//
// This uses a consumer of its own: the compiler would take the loops of the other one to be
// divergent, as it does these, if they had registers in common. Shuffles separate them.
template <typename Config, typename Element, typename Consumer>
__device__ __forceinline__ void consume_again(const Forward& params, const ForwardPlan& plan,
                                              const ForwardSmem<Config>& smem,
                                              const Consumer& before) {
  if (__reduce_max_sync(0xffffffff, smem.again->wait()) == 0) return;
  ForwardConsumer<Config, Element, kNoModifier> consumer(params, plan, smem);
  const auto take = [](auto& state, const auto& from) {
    state.stage = __shfl_sync(0xffffffff, from.stage, 0);
    state.parity = __shfl_sync(0xffffffff, from.parity, 0);
  };
  take(consumer.key_stage, before.key_stage);
  take(consumer.value_stage, before.value_stage);
  take(consumer.query_stage, before.query_stage);
  consumer.works = __shfl_sync(0xffffffff, before.works, 0);
  if constexpr (Config::kTellsLast) consumer.wait_query();  // this one signals the end
  consumer.release_query();
  while (consumer.wait_query()) {
    attend_again<Config>(consumer);
    consumer.release_query();
    finish_rows<Config, Element, kNoModifier>(plan, consumer.work_before(0), consumer.warp_row,
                                              consumer.softmax, consumer.out);
  }
}

// Without modifiers: marks the n-th query tile of a block for redo if this warp's part of it needs
// that. Its keys have been read, and its output has been computed.
template <typename Consumer>
__device__ __forceinline__ void check_query_tile(const Consumer& consumer,
                                                 const OnlineSoftmax<1>& softmax, uint32_t n) {
  if constexpr (Consumer::kPlain && !Consumer::kAlwaysExact) {
    if (exceeds(softmax, consumer.out)) consumer.smem.again->add(n);
  }
}

// Processes one query tile after the other, their key tiles in one chain: a query tile's first
// scores and exponentials overlap the last product of the one before.
template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void consume_chained(const Forward& params, const ForwardPlan& plan,
                                                const ForwardSmem<Config>& smem) {
  using Consumer = ForwardConsumer<Config, Element, kModifiers, Value>;
  Consumer consumer(params, plan, smem);
  const QueryWork& work = consumer.work;
  // State of the previous query tile, whose output is complete except for one product.
  bool unfinished = false;
  RowRange attended;
  int32_t tile = 0;
  const auto finish = [&] {
    if constexpr (Consumer::kPlain) settle(consumer);
    consumer.clear_values(turned_tile<Config, kModifiers>(tile, attended), attended, 1);
    consumer.start_out();
    consumer.await_out();
    check_query_tile(consumer, consumer.softmax, consumer.works - 2);
    finish_rows<Config, Element, kModifiers>(plan, consumer.work_before(1), consumer.warp_row,
                                             consumer.softmax, consumer.out);
    consumer.out_started = 0;
  };
  while (consumer.wait_query()) {
    if (!consumer.has_keys()) {
      if (unfinished) finish();
      unfinished = false;
      if constexpr (Consumer::Modified::kFixedTiles) sync_fixed_tiles();
      consumer.read_description();
      finish_empty_rows<Element>(plan, work, consumer.warp_row);
      consumer.release_query();
      continue;
    }
    consumer.read_ahead(work.tile);
    if constexpr (Consumer::Modified::kSaturates || Consumer::Modified::kInScores) {
      multiply_query(consumer);
    }
    consumer.wait_key();
    consumer.start_scores();
    consumer.read_description();
    if (unfinished) {
      const OnlineSoftmax<1> softmax = consumer.softmax;
      if constexpr (Consumer::kPlain) settle(consumer);
      const auto first_tile = [&](auto kind) {
        consumer.clear_values(turned_tile<Config, kModifiers>(tile, attended), attended, 1);
        consumer.start_out();
        consumer.template first_tile<true, kind()>(work.tile);
      };
      // No other code should be fetched between tiles of a run of one segment: the instruction
      // cache is small.
      if (Consumer::kSegmented && consumer.one_segment && consumer.in_run(work.tile)) {
        consumer.one_segment = true;
        first_tile(std::integral_constant<TileKind, TileKind::kInRun>{});
      } else {
        first_tile(std::integral_constant<TileKind, TileKind::kAny>{});
      }
      check_query_tile(consumer, softmax, consumer.works - 2);
      finish_rows<Config, Element, kModifiers>(plan, consumer.work_before(1), consumer.warp_row,
                                               softmax, consumer.out);
      consumer.out_started = 0;
    } else {
      consumer.template first_tile<false>(work.tile);
    }
    unfinished = true;
    attended = work.attended;
    tile = work.tile;
    if constexpr (kModifiers == kSegments) {
      for (;;) {
        for (; consumer.run_goes_on(tile); ++tile) {
          consumer.template next_tile<TileKind::kInRun>(tile, tile + 1);
        }
        if (consumer.is_last(tile)) break;
        const int32_t last = tile;
        tile = consumer.note.next();
        consumer.next_tile(last, tile, consumer.note.next_one_segment());
      }
    } else if constexpr (Consumer::kPlain) {
      tile = plain_tiles<Config>(consumer, tile);
    } else {
      if constexpr (Consumer::Modified::kFixedTiles) {
        tile = fixed_tiles<Config>(consumer, tile);
        consumer.wait_value();  // in there, it would take registers from the loop below
      }
      for (; !consumer.is_last(tile); ++tile) {
        if constexpr (kModifiers == kBias && !Consumer::Modified::kInScores) {
          next_biased_tile<Config>(consumer, tile, tile + 1);
        } else {
          consumer.next_tile(tile, tile + 1);
        }
      }
    }
    if constexpr (Config::kQueryStages > 1) consumer.release_query();
  }
  if (unfinished) finish();
  if constexpr (Consumer::kPlain) {
    smem.again->tell();
    consume_again<Config, Element>(params, plan, smem, consumer);
  }
}

// Processes one query tile at a time: with several modifiers, or a mask's bytes.
template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void consume_masked(const Forward& params, const ForwardPlan& plan,
                                               const ForwardSmem<Config>& smem) {
  ForwardConsumer<Config, Element, kModifiers, Value> consumer(params, plan, smem);
  const QueryWork& work = consumer.work;
  while (consumer.wait_query()) {
    if (!consumer.has_keys()) {
      finish_empty_rows<Element>(plan, work, consumer.warp_row);
      consumer.release_query();
      continue;
    }
    int32_t tile = work.tile;
    consumer.read_ahead(tile);
    consumer.wait_key();
    consumer.out_started = 0;
    consumer.start_scores();
    KeyTileNote note = consumer.key_note(tile);
    consumer.template first_tile<false>(tile, note.one_segment());
    while (note.next() >= 0) {
      const int32_t last = tile;
      tile = note.next();
      consumer.next_tile(last, tile, note.next_one_segment(), &note);
    }
    consumer.release_query();
    consumer.clear_values(tile, work.attended);
    consumer.start_out();
    consumer.await_out();
    finish_rows<Config, Element, kModifiers>(plan, consumer.work_before(0), consumer.warp_row,
                                             consumer.softmax, consumer.out);
  }
}

// Processes one query tile at a time: with scores ahead, or for few query tiles. With two key
// groups, the warpgroups divide a tile's keys, and the first adds up their outputs.
template <typename Config, typename Element>
__device__ __forceinline__ void consume_apart(const Forward& params, const ForwardPlan& plan,
                                              const ForwardSmem<Config>& smem) {
  using Consumer = std::conditional_t<Config::kScoresAhead, AheadConsumer<Config, Element>,
                                      ForwardConsumer<Config, Element, kNoModifier>>;
  Consumer consumer(params, plan, smem);
  const QueryWork& work = consumer.work;
  const int key_group = Config::kKeyGroups > 1 ? consumer.group / Config::kRowGroups : 0;
  RingState<Config::kStages> stage;  // stage of the query tile's first key tile
  bool partial_used = false;
  const auto next = [&] {
    return !(Config::kTellsLast && consumer.is_last_query) && consumer.wait_query();
  };
  for (bool more = consumer.wait_query(); more; more = next()) {
    if (!consumer.has_keys()) {
      consumer.read_description();
      if (key_group == 0) finish_empty_rows<Element>(plan, work, consumer.warp_row);
      consumer.release_query();
      if constexpr (Consumer::kPlain && Config::kTellsLast) {
        if (consumer.is_last_query) smem.again->tell();
      }
      continue;
    }
    // Every kKeyGroups-th tile, from this warpgroup's first one on.
    const int32_t tile = work.tile + key_group;
    if constexpr (Config::kKeyGroups > 1) {
      consumer.key_stage = consumer.value_stage = stage;
      consumer.key_stage.advance(key_group);
      consumer.value_stage.advance(key_group);
      stage.advance(work.end - work.tile);
    }
    consumer.softmax = OnlineSoftmax<1>();
    consumer.out_started = 0;
    float normalizer[2];
    const auto beside = [&] {
      if constexpr (Config::kKeyGroups == 1) {
        finish_statistics<kNoModifier>(plan, consumer.work_before(0), consumer.warp_row,
                                       consumer.softmax, normalizer);
      }
    };
    if (Config::kKeyGroups == 1 || tile < work.end) {
      consumer.attend(tile, beside);
    } else {
      consumer.read_description();
    }
    consumer.release_query();
    if constexpr (Consumer::kPlain) {
      check_query_tile(consumer, consumer.softmax, consumer.works - 1);
      if constexpr (Config::kTellsLast) {  // so that all have signaled when the output is stored
        if (consumer.is_last_query) smem.again->tell();
      }
    }
    if (key_group == 1) {
      if (partial_used) ptx::barrier_sync(kPartialEmpty, Config::kConsumers * kWarpgroup);
      store_partial(smem, consumer.softmax, consumer.out, consumer.out_started != 0);
      ptx::barrier_arrive(kPartialFull, Config::kConsumers * kWarpgroup);
    } else {
      if constexpr (Config::kKeyGroups > 1) {
        ptx::barrier_sync(kPartialFull, Config::kConsumers * kWarpgroup);
        add_partial(smem, consumer.to_log2, consumer.softmax, consumer.out);
        ptx::barrier_arrive(kPartialEmpty, Config::kConsumers * kWarpgroup);
      }
      if constexpr (Config::kKeyGroups > 1) {
        finish_statistics<kNoModifier>(plan, consumer.work_before(0), consumer.warp_row,
                                       consumer.softmax, normalizer);
      }
      store_out<Config, Element>(plan, consumer.work_before(0), consumer.warp_row, normalizer,
                                 consumer.out);
    }
    partial_used = true;
  }
  if constexpr (Consumer::kPlain) {
    if constexpr (!Config::kTellsLast) smem.again->tell();
    consume_again<Config, Element>(params, plan, smem, consumer);
  }
}

// Called by consumer threads, which have nothing to do yet.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void initialise(const ForwardMaps& maps,
                                           const ForwardSmem<Config>& smem) {
  if (threadIdx.x == kWarpgroup) {
    if constexpr ((kModifiers & kSegments) != 0) init_plan_barriers<Config>(*smem.segments);
    constexpr bool kConverts = kConvertsValues<Config, Element, kModifiers>;
    if constexpr (kChecksLate<Config, kModifiers>) {
      smem.again->init(Config::kConsumers * 4 + (kConverts ? kConverterWarps : 0));
    }
    if constexpr (kConverts) smem.conversions->init();
    smem.init_barriers(kConverts ? kConverterArrivals : 1);
  }
  if (threadIdx.x == kWarpgroup + 32) ptx::prefetch_tensormap(maps.query);
  if (threadIdx.x == kWarpgroup + 64) ptx::prefetch_tensormap(maps.key);
  if (threadIdx.x == kWarpgroup + 96) ptx::prefetch_tensormap(maps.value);
}

// The number of registers that each consumer thread cedes to those of the first warpgroup: for
// warps that convert many values at a time, and with segments alone for the warp that plans.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr int kLeftRegisters = kConvertsMany<Config, Element, kModifiers> ||
                                              (kModifiers == kSegments && Config::kConsumers == 2)
                                          ? 8
                                          : 0;

// Processes all query tiles, with V in shared memory as numbers of type Value.
template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void consume_all(const Forward& params, const ForwardPlan& plan,
                                            const ForwardSmem<Config>& smem) {
  if constexpr (!ForwardConsumer<Config, Element, kModifiers>::kChained) {
    consume_masked<Config, Element, kModifiers, Value>(params, plan, smem);
  } else if constexpr (Config::kKeyGroups > 1 || Config::kScoresAhead) {
    consume_apart<Config, Element>(params, plan, smem);
  } else {
    consume_chained<Config, Element, kModifiers, Value>(params, plan, smem);
  }
}

// `half`: whether V is read in float16.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void consume(const Forward& params, const ForwardPlan& plan,
                                        const MapsOf<Config>& maps, const ForwardSmem<Config>& smem,
                                        bool half) {
  constexpr bool kApart = kStartsApart<Config, kModifiers>;
  if constexpr (kApart) initialise<Config, Element, kModifiers>(maps, smem);
  ptx::setmaxnreg_inc<Config::kConsumerRegisters - kLeftRegisters<Config, Element, kModifiers>>();
  if constexpr (kApart) ptx::barrier_sync(kStarted, kStartThreads<Config, Element, kModifiers>);
  if constexpr (kReadsHalfValues<Config, Element, kModifiers>) {
    if (half) return consume_all<Config, Element, kModifiers, __half>(params, plan, smem);
  }
  consume_all<Config, Element, kModifiers, Element>(params, plan, smem);
}

template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void produce(const Forward& params, const ForwardPlan& plan,
                                        const MapsOf<Config>& maps, const ForwardSmem<Config>& smem,
                                        const SkipsOf<Config>& skips, const CUtensorMap& value_map,
                                        const BoxAxes& value_axes) {
  constexpr bool kSkips = (kModifiers & kSegments) != 0;
  ptx::setmaxnreg_dec<Config::kProducerRegisters +
                      Config::kConsumers * kLeftRegisters<Config, Element, kModifiers>>();
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    if constexpr (kSkips) {
      produce_keys_of_segments(plan, maps, smem);
    } else {
      produce_keys<Config, Element, kModifiers>(plan, maps.key, value_map, value_axes, smem, skips);
    }
  } else if (warp <= kQueryWarps<Config, Element, kModifiers>) {
    if constexpr (kSkips) {
      produce_queries_of_segments(plan, maps, smem, warp - 1);
    } else {
      constexpr int kGroups = Config::kRowGroups / kQueryWarps<Config, Element, kModifiers>;
      produce_queries<Config, Element, kModifiers, kGroups>(params, plan, maps, smem, skips,
                                                            warp - 1);
    }
  } else if constexpr (kConvertsValues<Config, Element, kModifiers>) {
    if (warp < 4 - kConverterWarps) return;
    if constexpr (kStartsApart<Config, kModifiers>) {
      ptx::barrier_sync(kStarted, kStartThreads<Config, Element, kModifiers>);
    }
    convert_values<Config, Config::kConsumers == 2 ? 8 : 4>(
        *smem.conversions, *smem.again, warp - (4 - kConverterWarps),
        smem.value(0).root + smem.value(0).offset, smem.value_full(0));
  } else if constexpr (kSkips) {
    static_assert(Config::kRowGroups == 2);
    plan_query_tiles<Config, Element, kModifiers>(params, plan, skips, *smem.segments);
  }
}

template <typename Config, typename Element, uint32_t kModifiers>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardPlan plan,
                   const __grid_constant__ MapsOf<Config> maps,
                   const __grid_constant__ Forward params, const SkipsOf<Config> skips,
                   const __grid_constant__ HalfValuesOf<Config, Element, kModifiers> half_values) {
  constexpr bool kSkips = (kModifiers & kSegments) != 0;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  __shared__ __align__(8) uint64_t barriers[ForwardSmem<Config>::kBarriers];
  __shared__ QueryWork works[ForwardSmem<Config>::kWorks];
  __shared__ std::conditional_t<kSkips, SegmentNotes<Config>, char> segments;
  __shared__ std::conditional_t<kChecksLate<Config, kModifiers>, QueryTilesAgain, char> again;
  constexpr bool kConverts = kConvertsValues<Config, Element, kModifiers>;
  using Conversions = ValueConversions<Config::kValueStages>;
  __shared__ std::conditional_t<kConverts, Conversions, char> conversions;
  // Opaque; otherwise the compiler converts the addresses anew wherever it needs them.
  ForwardSmem<Config> smem{ptx::shared_address(smem_bytes),
                           ptx::shared_address(barriers),
                           works,
                           reinterpret_cast<SegmentNotes<Config>*>(&segments),
                           reinterpret_cast<QueryTilesAgain*>(&again),
                           reinterpret_cast<Conversions*>(&conversions)};
  asm volatile("" : "+r"(smem.root), "+r"(smem.barriers));

  constexpr bool kReadsHalf = kReadsHalfValues<Config, Element, kModifiers>;
  bool half = false;
  if constexpr (!kStartsApart<Config, kModifiers>) {
    initialise<Config, Element, kModifiers>(maps, smem);
    if constexpr (kReadsHalf) {
      half = half_values.usable();
    } else {
      __syncthreads();
    }
  }
  const CUtensorMap* value_map = &maps.value;
  const BoxAxes* value_axes = &plan.value;
  if constexpr (kReadsHalf) {
    if (half) value_map = &half_values.map, value_axes = &half_values.axes;
  }
  // ptxas places the code of the second branch first, right after the kernel's start. A far jump
  // there costs 300 clocks if the code is not in the cache.
  if constexpr (Config::kProducersFirst || kModifiers == kSegments) {
    if (threadIdx.x >= kWarpgroup) {
      consume<Config, Element, kModifiers>(params, plan, maps, smem, half);
    } else {
      produce<Config, Element, kModifiers>(params, plan, maps, smem, skips, *value_map,
                                           *value_axes);
    }
  } else {
    if (threadIdx.x < kWarpgroup) {
      produce<Config, Element, kModifiers>(params, plan, maps, smem, skips, *value_map,
                                           *value_axes);
    } else {
      consume<Config, Element, kModifiers>(params, plan, maps, smem, half);
    }
  }
}

}  // namespace jax_flash::sm90
