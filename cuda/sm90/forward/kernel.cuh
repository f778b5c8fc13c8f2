// Implements the forward pass with warpgroup-level matrix instructions: FlashAttention-3
// (arXiv:2407.08608).
//
//   for each tile of keys and values that some row of the block may attend to
//     S = Q K^T                     registers of a warpgroup, 64 rows
//     P = 2^(scale log2(e) S - m)   m the running maximum of each row, in log2 units
//     O = O 2^(m_old - m) + P V     P from registers
//   out = O / l, lse = (m + log2 l) / log2(e)
//
// Roles of warps. The first warpgroup is the producer. Its first warp starts the TMA copies of K
// and V. For each 64 rows of Q, one more warp copies these rows and their bias, and writes a
// description of the query tile for the consumer (QueryWork). If two warps convert values
// (sm90/forward/values.cuh), a single warp does this for all consumers. With segments, the last
// warp plans one query tile ahead (sm90/forward/segments.cuh).
//
// Every other warpgroup is a consumer and owns 64 rows of Q. It starts S of a tile and P V of the
// tile before, and computes the tile's exponentials while P V runs.
//
// Blocks are persistent, unless query tiles are very long. An order is a consumer's loop over query
// tiles and key tiles. A row of plan/recipes.h determines the order; plan/choose.cc chooses the row
// for a call:
//
//   order_chained.cuh      query tiles in one chain: a query tile's first scores overlap the last
//                          product of the query tile before
//   order_single.cuh       one query tile at a time: with all modifiers, with a mask of bytes, and
//                          with the next two
//   order_ahead.cuh        S a tile ahead, if there are registers for more scores
//   order_split_keys.cuh   two warpgroups share a query tile and divide its keys, if there are few
//                          query tiles
//   order_redo.cuh         without modifiers: redoes query tiles, without overlap
//
// step.cuh implements the step for one key tile, modifier.cuh declares the hooks of modifiers. A
// mask that all queries share is no modifier here, but a switch of kernels without modifiers
// (Config::kKeyMask, key_mask.cuh).
//
// Map of dynamic shared memory (ForwardConfig, ForwardSmem), from its start:
//
//   Q         [kQueryStages][kRowGroups] tiles of 64 rows
//   K         [kStages] tiles of kBlockKv rows
//   V         [kValueStages] tiles of kBlockKv rows
//   partial   with divided keys: one consumer's output in float32, and its statistics
//   own       with a bias: staging for each consumer warp's 16 rows of a tile
//
// Static shared memory holds the full and empty barriers of each stage, the descriptions of kWorks
// query tiles for each 64 rows, and the state for segments, redone query tiles and converted
// values.
//
// Hazard: the division of this code into functions changes the machine code that ptxas generates;
// tests/machine_code.py shows the changes. A reference to a local bool, or a consumer's own
// reference to ForwardPlan in place of an argument, may be enough.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/segments.cuh"
#include "params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/dropout.cuh"
#include "sm90/forward/half_values.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/order_chained.cuh"
#include "sm90/forward/order_single.cuh"
#include "sm90/forward/pairs.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/producer.cuh"
#include "sm90/forward/segments.cuh"
#include "sm90/forward/slopes.cuh"
#include "sm90/forward/soft_cap.cuh"
#include "sm90/forward/values.cuh"

namespace jax_flash::sm90 {

// Initializes barriers and prefetches tensor maps. Consumer threads do it, since they are idle at
// the start.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void initialise(const ForwardMaps& maps,
                                           const ForwardSmem<Config>& smem) {
  if (threadIdx.x == kWarpgroup) {
    if constexpr (ForwardModifier<Config, Element, kModifiers>::kSkips)
      init_plan_barriers<Config>(*smem.segments);
    constexpr bool kConverts = kConvertsValues<Config, Element, kModifiers>;
    if constexpr (kChecksLate<Config, kModifiers>) {
      smem.to_redo->init(Config::kConsumers * 4 + (kConverts ? kConverterWarps : 0));
    }
    if constexpr (kConverts) smem.conversions->init();
    smem.init_barriers(kConverts ? kConverterArrivals : 1);
  }
  if (threadIdx.x == kWarpgroup + 32) ptx::prefetch_tensormap(maps.query);
  if (threadIdx.x == kWarpgroup + 64) ptx::prefetch_tensormap(maps.key);
  if (threadIdx.x == kWarpgroup + 96) ptx::prefetch_tensormap(maps.value);
}

// The number of registers that each consumer thread cedes to the first warpgroup, for warps that
// convert many values at a time and, with segments, for the planning warp.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr int kLeftRegisters =
    kConvertsMany<Config, Element, kModifiers> ||
            (ForwardModifier<Config, Element, kModifiers>::kHasRuns && Config::kConsumers == 2)
        ? 8
        : 0;

// Processes all query tiles of a block. Value: the type of V in shared memory.
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

// Runs a consumer warpgroup. `half`: true if V is read as float16.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void consume(const Forward& params, const ForwardPlan& plan,
                                        const MapsOf<Config>& maps, const ForwardSmem<Config>& smem,
                                        bool half) {
  constexpr bool kApart = kStartsApart<Config, kModifiers>;
  if constexpr (kApart) initialise<Config, Element, kModifiers>(maps, smem);
  ptx::setmaxnreg_inc<Config::kConsumerRegisters - kLeftRegisters<Config, Element, kModifiers>>();
  if constexpr (kApart) ptx::barrier_sync(kStarted, kStartThreads<Config, Element, kModifiers>);
  if constexpr (Config::kKeyMask) ptx::griddepcontrol_wait();  // for the mask's bits
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
  constexpr bool kSkips = ForwardModifier<Config, Element, kModifiers>::kSkips;
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
        *smem.conversions, *smem.to_redo, warp - (4 - kConverterWarps),
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
  constexpr bool kSkips = ForwardModifier<Config, Element, kModifiers>::kSkips;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  __shared__ __align__(8) uint64_t barriers[ForwardSmem<Config>::kBarriers];
  __shared__ QueryWork works[ForwardSmem<Config>::kWorks];
  __shared__ std::conditional_t<kSkips, SegmentNotes<Config>, char> segments;
  __shared__ std::conditional_t<kChecksLate<Config, kModifiers>, QueryTilesToRedo, char> to_redo;
  constexpr bool kConverts = kConvertsValues<Config, Element, kModifiers>;
  using Conversions = ValueConversions<Config::kValueStages>;
  __shared__ std::conditional_t<kConverts, Conversions, char> conversions;
  // The asm makes the addresses opaque; otherwise the compiler would convert them at every use.
  ForwardSmem<Config> smem{ptx::shared_address(smem_bytes),
                           ptx::shared_address(barriers),
                           works,
                           reinterpret_cast<SegmentNotes<Config>*>(&segments),
                           reinterpret_cast<QueryTilesToRedo*>(&to_redo),
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
  // from there costs 300 clocks if its target is not in the instruction cache.
  if constexpr (Config::kProducersFirst || ForwardModifier<Config, Element, kModifiers>::kHasRuns) {
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
