// Implements the producer warps of the sm_90 forward kernel: produce_keys() starts the copies of K
// and V, produce_queries() those of Q and bias, and describes query tiles to consumers. Both
// iterate over the block's query tiles in the order of sm90/forward/schedule.cuh. With segments,
// sm90/forward/segments.cuh has other producers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/segment_spans.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/key_mask.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/order_ahead.cuh"
#include "sm90/forward/order_window.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"

namespace jax_flash::sm90 {

// True if consumers initialize the barriers in shared memory while producers find their first
// tiles; a named barrier, kStarted, then synchronizes them. Otherwise __syncthreads() does so at
// the start: with modifiers or divided keys, kStarted would make the compiler treat loops as
// divergent (TUNING.md).
template <typename Config, uint32_t kModifiers>
inline constexpr bool kStartsApart = kModifiers == kNoModifier && Config::kKeyGroups == 1;

// The number of warps that start copies of Q: one for each 64 rows, or one for all, if the others
// convert values.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr int kQueryWarps =
    kConvertsValues<Config, Element, kModifiers> ? 1 : Config::kRowGroups;

// The number of threads at the barrier kStarted.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr int kStartThreads =
    32 * (1 + kQueryWarps<Config, Element, kModifiers> +
          (kConvertsValues<Config, Element, kModifiers> ? kConverterWarps : 0)) +
    kWarpgroup * Config::kConsumers;

// Returns a cursor over a block's query tiles. If batches share a matrix (a mask or a bias), the
// same query tile of these batches is contiguous in the order.
template <uint32_t kModifiers>
__device__ __forceinline__ QueryTileCursor query_tiles(const ForwardPlan& plan) {
  return {plan.schedule, is_matrix(kModifiers) ? plan.modifiers.batch_shift : 0};
}

// The data that determine skipped key tiles: hulls of a mask of keys, a mask's words, or spans of
// segments, if there are any.
template <typename Config>
using SkipsOf = std::conditional_t<Config::kKeyMask, KeyMask,
                                   std::conditional_t<Config::kMaskWords, MaskTiles, SegmentSpans>>;

// Returns the key tiles of a query tile, for producers that find them themselves. A mask of keys
// also restricts the band.
template <typename Config>
__device__ __forceinline__ Range key_tiles(const SkipsOf<Config>& skips, Band& band,
                                           const QueryTileIndex& q, int32_t row0) {
  if constexpr (Config::kKeyMask) {
    return skips.template restrict_to_hull<Config::kBlockQ, Config::kBlockKv>(band, q, row0);
  }
  const Range range = kv_tiles<Config::kBlockKv>(band, row0, row0 + Config::kBlockQ);
  if constexpr (Config::kMaskWords) return skips.template narrow<Config::kBlockQ>(range, q, row0);
  return range;
}
// Returns the first key that a mask of keys allows, or 0.
template <typename Config>
__device__ __forceinline__ int32_t first_key(const SkipsOf<Config>& skips,
                                             const QueryTileIndex& q) {
  if constexpr (Config::kKeyMask) return skips.hulls[skips.index(q)].first;
  return 0;
}
template <typename Config>
__device__ __forceinline__ void wait_for_skips(const SkipsOf<Config>& skips) {
  if constexpr (Config::kKeyMask) {
    ptx::griddepcontrol_wait();
  } else if constexpr (Config::kMaskWords) {
    if (skips.ranges != nullptr) ptx::griddepcontrol_wait();
  }
}

// Waits until all query tiles are done, then produces those to be redone. Returns whether there are
// any.
template <typename Config, typename Produce>
__device__ __forceinline__ bool produce_tiles_to_redo(const ForwardPlan& plan,
                                                      const ForwardSmem<Config>& smem,
                                                      Produce produce) {
  uint32_t tiles = smem.to_redo->wait();
  if (tiles == 0) return false;
  for (auto cursor = query_tiles<kNoModifier>(plan); cursor.valid(); cursor.advance()) {
    if (tiles & 1) produce(cursor);
    tiles = __funnelshift_r(tiles, tiles, 1);
  }
  return true;
}

// Copies K and V for all query tiles. Called by one warp. `value_map` and `value_axes` describe V,
// or its float16 copy if there is one.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void produce_keys(const ForwardPlan& plan, const CUtensorMap& key_map,
                                             const CUtensorMap& value_map,
                                             const BoxAxes& value_axes,
                                             const ForwardSmem<Config>& smem,
                                             const SkipsOf<Config>& skips) {
  wait_for_skips<Config>(skips);
  RingState<Config::kStages> key_stage;
  RingState<Config::kValueStages> value_stage, conversion;
  bool started = false;
  // True while values of every second tile are converted; in a redo, none are.
  constexpr bool kConverts = kConvertsValues<Config, Element, kModifiers>;
  bool converts = kConverts;
  // Returns false for a thread that has nothing to do.
  const auto produce = [&](const QueryTileCursor& cursor) {
    const QueryTileIndex q = cursor.index();
    const int32_t row0 = q.tile * Config::kBlockQ;
    Band band = plan.band.of<kModifiers == kNoModifier>(q.batch_axes);
    Range range = key_tiles<Config>(skips, band, q, row0);
    int32_t end = INT32_MAX, tiles = 0;  // of the range before it is reordered
    if constexpr (kReorders<Config, kModifiers>) {
      if (reorders<Config>(plan, range, band, row0, first_key<Config>(skips, q))) {
        end = range.end;
        tiles = range.end - range.first;
        ++range.first;
        ++range.end;
      }
    }
    const auto first_row = [&](int32_t tile) {
      if constexpr (Config::kScoresAhead) {
        tile = tile_from_end<Config>(range.first, range.end, tile);
      }
      if (kReorders<Config, kModifiers> && tile >= end) tile -= tiles;
      return tile * Config::kBlockKv;
    };
    const auto load_key = [&](int32_t tile) {
      ptx::mbarrier_wait(smem.key_empty(key_stage.stage), key_stage.parity ^ 1);
      load_tile_boxes(smem.key(key_stage.stage), key_map, smem.key_full(key_stage.stage), plan.key,
                      q.batch_axes, q.kv_head, first_row(tile));
      key_stage.advance();
    };
    const auto load_value = [&](int32_t tile) {
      ptx::mbarrier_wait(smem.value_empty(value_stage.stage), value_stage.parity ^ 1);
      uint32_t arrived = smem.value_full(value_stage.stage);
      if constexpr (kConverts) {
        if (converts && is_converted<Config>(tile - range.first)) {
          arrived = smem.conversions->add(conversion, value_stage.stage);
        } else {
          // These are all arrivals of converting threads but the last, load_tile_boxes()'s.
          for (int i = 1; i < kConverterArrivals; ++i) ptx::mbarrier_arrive(arrived);
        }
      }
      load_tile_boxes(smem.value(value_stage.stage), value_map, arrived, value_axes, q.batch_axes,
                      q.kv_head, first_row(tile));
      value_stage.advance();
    };
    if (!started) {
      if constexpr (kStartsApart<Config, kModifiers>) {
        ptx::barrier_sync(kStarted, kStartThreads<Config, Element, kModifiers>);
      }
      // Other lanes would run ahead through the loop, waste issue slots, and delay the leader.
      if (threadIdx.x % 32 != 0) return false;
      started = true;
    }
    if (range.first >= range.end) return true;
    load_key(range.first);
    for (int32_t tile = range.first; tile < range.end; ++tile) {
      if (tile + 1 < range.end) load_key(tile + 1);
      load_value(tile);
    }
    return true;
  };
  for (auto cursor = query_tiles<kModifiers>(plan); cursor.valid(); cursor.advance()) {
    if (!produce(cursor)) return;
  }
  if constexpr (kConverts) {
    if (threadIdx.x % 32 == 0) {
      // The end takes a place in the ring: the last tile there must have been converted.
      ptx::mbarrier_wait(smem.value_empty(value_stage.stage), value_stage.parity ^ 1);
      smem.conversions->end(conversion);
    }
    converts = false;
  }
  if constexpr (kChecksLate<Config, kModifiers>) produce_tiles_to_redo(plan, smem, produce);
}

// Announces to kGroups consumers that there is no n-th query tile.
template <typename Config, int kGroups>
__device__ __forceinline__ void announce_end(const ForwardSmem<Config>& smem, uint32_t stage,
                                             uint32_t parity, uint32_t n, int first_group) {
  for (int group = first_group; group < first_group + kGroups; ++group) {
    ptx::mbarrier_wait_asleep(smem.query_empty(stage, group), parity ^ 1);
    smem.work(group, n).row0 = -1;
    for (int i = 0; i < 2; ++i) ptx::mbarrier_arrive(smem.query_full(stage, group));
    ptx::mbarrier_arrive(smem.described(stage, group));
  }
}

// Returns the key tiles of a query tile as producers count them (sm90/forward/order_window.cuh).
template <typename Config, uint32_t kModifiers>
__device__ __forceinline__ Range counted_key_tiles(const ForwardPlan& plan,
                                                   const SkipsOf<Config>& skips, Band& band,
                                                   const QueryTileIndex& q, int32_t row0) {
  Range range = key_tiles<Config>(skips, band, q, row0);
  if constexpr (kReorders<Config, kModifiers>) {
    const int32_t first = first_key<Config>(skips, q);
    const int32_t more = reorders<Config>(plan, range, band, row0, first) ? 1 : 0;
    range.first += more;
    range.end += more;
  }
  return range;
}
__device__ __forceinline__ bool is_last(QueryTileCursor cursor) {
  cursor.advance();
  return !cursor.valid();
}

// For kGroups consumers from first_group on, copies their rows of Q and, with kBiasBoxes, of the
// bias, and describes the query tiles to them. Called by one warp. Its lambdas are not functions of
// their own, since these change the consumers' machine code.
template <typename Config, typename Element, uint32_t kModifiers, int kGroups>
__device__ __forceinline__ void produce_queries(const Forward& params, const ForwardPlan& plan,
                                                const MapsOf<Config>& maps,
                                                const ForwardSmem<Config>& smem,
                                                const SkipsOf<Config>& skips, int first_group) {
  wait_for_skips<Config>(skips);
  const bool leader = threadIdx.x % 32 == 0;
  RingState<Config::kQueryStages> stage;
  uint32_t works = 0, bias_parity = 0;
  bool started = false;
  const auto wait_empty = [&](int group) {
    ptx::mbarrier_wait_asleep(smem.query_empty(stage.stage, group), stage.parity ^ 1);
  };
  const auto produce = [&](const QueryTileCursor& cursor) {  // as in produce_keys()
    const QueryTileIndex q = cursor.index();
    Band band = plan.band.of<kModifiers == kNoModifier>(q.batch_axes);
    const int32_t row0 = q.tile * Config::kBlockQ;
    const Range range = counted_key_tiles<Config, kModifiers>(plan, skips, band, q, row0);
    if (!started) {
      if constexpr (kStartsApart<Config, kModifiers>) {
        ptx::barrier_sync(kStarted, kStartThreads<Config, Element, kModifiers>);
      }
      // As in produce_keys(). It costs causal calls of head dim 64 2%: their description is short.
      if ((Config::kHeadDim > 64 || Config::kBiasBoxes) && !leader) return false;
      started = true;
    }
    const auto load = [&](int group) {
      const uint32_t full = smem.query_full(stage.stage, group);
      wait_empty(group);
      if (range.first < range.end) {  // first, since the description takes a while
        load_tile_boxes(smem.query(stage.stage, group), maps.query, full, plan.query, q.batch_axes,
                        q.head, row0 + group * 64);
      } else {
        ptx::mbarrier_arrive(full);
      }
      QueryWork& work = smem.work(group, works);
      work.tile = range.first;
      work.end = range.end;
      if (Config::kMarksLast && is_last(cursor)) work.end |= QueryWork::kLast;
      work.row0 = row0;
      ptx::mbarrier_arrive(full);
    };
    const auto describe = [&](int group) {
      describe_query_tile<Config, Element, kModifiers>(params, plan, q, band, row0,
                                                       smem.work(group, works));
      if constexpr (Config::kKeyMask) skips.describe(q, smem.work(group, works));
      ptx::mbarrier_arrive(smem.described(stage.stage, group));
      if constexpr (Config::kBiasBoxes) {
        load_bias<Config>(smem, maps, group, q, row0 + group * 64, range.first, range.end,
                          bias_parity);
      }
    };
    if (leader) {
      if constexpr (kGroups == 1) {
        load(first_group);
        describe(first_group);
      } else {
        // Two groups are unrolled: a loop makes the consumers' code slower (TUNING.md). Short
        // calls keep it, since they wait for code to be fetched; three groups would spill.
        constexpr int kUnroll = kGroups == 2 && !Config::kMarksLast ? 2 : 1;
#pragma unroll kUnroll
        for (int group = 0; group < kGroups; ++group) load(group);
#pragma unroll kUnroll
        for (int group = 0; group < kGroups; ++group) describe(group);
      }
    }
    stage.advance();
    ++works;
    return true;
  };
  for (auto cursor = query_tiles<kModifiers>(plan); cursor.valid(); cursor.advance()) {
    if (!produce(cursor)) return;
  }
  if (!leader) return;
  const auto notify_of_end = [&] {
    announce_end<Config, kGroups>(smem, stage.stage, stage.parity, works, first_group);
    stage.advance();
    ++works;
  };
  notify_of_end();
  if constexpr (kChecksLate<Config, kModifiers>) {
    if (produce_tiles_to_redo(plan, smem, produce)) notify_of_end();
  }
}

}  // namespace jax_flash::sm90
