// Processes one query tile at a time in the sm_90 forward kernel, without overlap between query
// tiles: in the kernel for all modifiers, with a mask of bytes, with scores a tile ahead, or if two
// warpgroups divide a query tile's keys.
//
// Consumers release a query tile's Q after its last scores. With divided keys, both warpgroups
// count all tiles of a query tile, so that their stages agree.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/order_ahead.cuh"
#include "sm90/forward/order_redo.cuh"
#include "sm90/forward/order_split_keys.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/step.cuh"
#include "sm90/ring.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Processes all query tiles of a block, with all modifiers or a mask of bytes.
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

// Processes a query tile's keys from `tile` on. Calls overlapped() while the last product is
// computed.
template <typename Config, typename Consumer, typename Overlapped>
__device__ __forceinline__ void attend(Consumer& consumer, int32_t tile, Overlapped overlapped) {
  if constexpr (Config::kScoresAhead) {
    consumer.attend(tile, overlapped);
  } else {
    consumer.wait_key();
    consumer.start_scores();
    consumer.read_description();
    consumer.template first_tile<false>(tile);
    for (; !consumer.is_last(tile); tile += Config::kKeyGroups) {
      consumer.next_tile(tile, tile + Config::kKeyGroups);
    }
    consumer.clear_values(tile, consumer.work.attended);
    consumer.start_out();
    overlapped();
    consumer.await_out();
  }
}

// Processes all query tiles of a block, with scores ahead or divided keys. With two key groups, the
// warpgroups divide the key tiles of each query tile, and the first adds up the two outputs.
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
    return !(Config::kMarksLast && consumer.is_last_query) && consumer.wait_query();
  };
  for (bool more = consumer.wait_query(); more; more = next()) {
    if (!consumer.has_keys()) {
      consumer.read_description();
      if (key_group == 0) finish_empty_rows<Element>(plan, work, consumer.warp_row);
      consumer.release_query();
      if constexpr (Consumer::kPlainSteps && Config::kMarksLast) {
        if (consumer.is_last_query) smem.to_redo->notify();
      }
      continue;
    }
    // This warpgroup takes every kKeyGroups-th tile from this one on.
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
    const auto overlapped = [&] {
      if constexpr (Config::kKeyGroups == 1) {
        finish_statistics<kNoModifier>(plan, consumer.work_before(0), consumer.warp_row,
                                       consumer.softmax, normalizer);
      }
    };
    if (Config::kKeyGroups == 1 || tile < work.end) {
      attend<Config>(consumer, tile, overlapped);
    } else {
      consumer.read_description();
    }
    consumer.release_query();
    if constexpr (Consumer::kPlainSteps) {
      check_query_tile(consumer, consumer.softmax, consumer.works - 1);
      if constexpr (Config::kMarksLast) {  // so that all have signalled when the output is stored
        if (consumer.is_last_query) smem.to_redo->notify();
      }
    }
    if (key_group == 1) {
      hand_over_partial<Config>(consumer, partial_used);
    } else {
      take_partial<Config>(consumer);
      if constexpr (Config::kKeyGroups > 1) {
        finish_statistics<kNoModifier>(plan, consumer.work_before(0), consumer.warp_row,
                                       consumer.softmax, normalizer);
      }
      store_out<Config, Element>(plan, consumer.work_before(0), consumer.warp_row, normalizer,
                                 consumer.out);
    }
    partial_used = true;
  }
  if constexpr (Consumer::kPlainSteps) {
    if constexpr (!Config::kMarksLast) smem.to_redo->notify();
    redo_query_tiles<Config, Element>(params, plan, smem, consumer);
  }
}

}  // namespace jax_flash::sm90
