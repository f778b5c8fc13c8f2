// Redoes the query tiles that sm90/forward/redo.cuh has marked, after all others of a block:
// without overlap, with running maxima that are the rows' greatest logits, and with V not
// converted.
#pragma once

#include <cstdint>

#include "params.h"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/exact_maximum.cuh"
#include "sm90/forward/order_ahead.cuh"
#include "sm90/forward/order_window.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/step.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Processes a query tile's keys again, one step after the other, without overlap.
template <typename Config, typename Consumer>
__device__ __forceinline__ void redo_query_tile(Consumer& consumer) {
  consumer.softmax = OnlineSoftmax<1>();
  consumer.by_bits = false;
  consumer.out_started = 0;
  if (!consumer.has_keys()) consumer.read_description();
  for (int32_t index = consumer.work.tile; index < consumer.work.end; ++index) {
    int32_t tile = index;
    if constexpr (Config::kScoresAhead) {
      tile = tile_from_end<Config>(consumer.work.tile, consumer.work.end, index);
    }
    consumer.wait_key();
    consumer.start_scores();
    if (index == consumer.work.tile) consumer.read_description();
    consumer.template await_scores<0>();
    consumer.release_key();
    consumer.modify(consumer.scores, tile, consumer.is_cut(tile));
    const bool rises = raise_maxima<false, false>(consumer.softmax, consumer.scores,
                                                  consumer.to_log2, consumer.factor);
    consumer.exponentials();
    consumer.convert();
    consumer.wait_value();
    const Range attended = consumer.work.attended;
    const int32_t values = reordered_tile<Config, kNoModifier>(tile, attended);
    if constexpr (Consumer::kClearsHolesLate) consumer.clear_holes(values);
    consumer.clear_values(values, attended);
    if (rises && consumer.out_started) consumer.rescale();
    consumer.start_out();
    consumer.await_out();
  }
}

// Redoes the query tiles for which some consumer warp of the block could not trust its sums or its
// values. All warps have signalled by now.
//
// This has a ForwardConsumer of its own. The compiler takes these loops to be divergent, and would
// do so with the main loops, too, if both had registers in common. Shuffles separate them.
template <typename Config, typename Element, typename Consumer>
__device__ __forceinline__ void redo_query_tiles(const Forward& params, const ForwardPlan& plan,
                                                 const ForwardSmem<Config>& smem,
                                                 const Consumer& before) {
  if (__reduce_max_sync(0xffffffff, smem.to_redo->wait()) == 0) return;
  ForwardConsumer<Config, Element, kNoModifier> consumer(params, plan, smem);
  const auto take = [](auto& state, const auto& from) {
    state.stage = __shfl_sync(0xffffffff, from.stage, 0);
    state.parity = __shfl_sync(0xffffffff, from.parity, 0);
  };
  take(consumer.key_stage, before.key_stage);
  take(consumer.value_stage, before.value_stage);
  take(consumer.query_stage, before.query_stage);
  consumer.works = __shfl_sync(0xffffffff, before.works, 0);
  if constexpr (Config::kMarksLast) consumer.wait_query();  // takes the announcement of the end
  consumer.release_query();
  while (consumer.wait_query()) {
    redo_query_tile<Config>(consumer);
    consumer.release_query();
    finish_rows<Config, Element, kNoModifier>(plan, consumer.work_before(0), consumer.warp_row,
                                              consumer.softmax, consumer.out);
  }
}

// Without modifiers: marks the n-th query tile of a block for redo if this warp's rows need that.
// All of its keys have been read, and its output has been computed.
template <typename Consumer>
__device__ __forceinline__ void check_query_tile(const Consumer& consumer,
                                                 const OnlineSoftmax<1>& softmax, uint32_t n) {
  if constexpr (Consumer::kPlainSteps && !Consumer::Modifier::kFixedMaxima &&
                !Consumer::kAlwaysExact) {
    float least = 0.0f;
    if constexpr (Consumer::kGuesses) least = consumer.least_sum();
    if (must_redo(softmax, consumer.out, least)) consumer.smem.to_redo->add(n);
  }
}

}  // namespace jax_flash::sm90
