// Processes query tiles in one chain in the sm_90 forward kernel: a query tile's first scores and
// exponentials overlap the last product of the one before.
//
// The states of two query tiles thus coexist for a while. consume_chained() keeps that of the
// earlier one, whose output is complete except for one product, or complete and not yet stored
// (kStoresLate); the consumer keeps that of the later one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/order_redo.cuh"
#include "sm90/forward/order_window.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plain_step.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/soft_cap.cuh"
#include "sm90/forward/step.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Writes the rows of a query tile that attends to no keys.
template <typename Element, typename Consumer>
__device__ __forceinline__ void skip_query_tile(Consumer& consumer) {
  if constexpr (Consumer::Modifier::kFixedTiles) sync_fixed_tiles();
  consumer.read_description();
  finish_empty_rows<Element>(consumer.plan, consumer.work, consumer.warp_row);
  consumer.release_query();
}

// Starts a query tile's first scores, and reads its description while they are computed.
template <typename Consumer>
__device__ __forceinline__ void start_query_tile(Consumer& consumer) {
  consumer.read_ahead(consumer.work.tile);
  if constexpr (Consumer::Modifier::kSaturates || Consumer::Modifier::kInScores) {
    multiply_query(consumer);
  }
  consumer.wait_key();
  consumer.start_scores();
  consumer.read_description();
}

// Processes a query tile's keys after its first tile, which is `tile`. Sets `tile` to the last one,
// whose product has not been started.
template <typename Config, uint32_t kModifiers, typename Consumer>
__device__ __forceinline__ void attend_rest(Consumer& consumer, int32_t& tile) {
  if constexpr (Consumer::kPlainSteps) {
    tile = plain_tiles<Config>(consumer, tile);
  } else {
    Consumer::Modifier::attend_rest(consumer, tile);
  }
}

// Starts the last product of the query tile before, whose last key tile is `tile`.
template <typename Config, uint32_t kModifiers, typename Consumer>
__device__ __forceinline__ void start_last_out(Consumer& consumer, int32_t tile,
                                               const Range& attended) {
  consumer.clear_values(reordered_tile<Config, kModifiers>(tile, attended), attended, 1);
  consumer.start_out();
}

// Writes the rows of the query tile before, whose sums are in `softmax`. `plan` is an argument,
// although the consumer has a reference to it, since ptxas would load that reference again.
template <typename Config, typename Element, uint32_t kModifiers, typename Consumer>
__device__ __forceinline__ void finish_last(const ForwardPlan& plan, Consumer& consumer,
                                            const OnlineSoftmax<1>& softmax) {
  check_query_tile(consumer, softmax, consumer.works - 2);
  finish_rows<Config, Element, kModifiers>(plan, consumer.work_before(1), consumer.warp_row,
                                           softmax, consumer.out);
  consumer.out_started = 0;
}

// Processes all query tiles of a block, their key tiles in one chain.
template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void consume_chained(const Forward& params, const ForwardPlan& plan,
                                                const ForwardSmem<Config>& smem) {
  using Consumer = ForwardConsumer<Config, Element, kModifiers, Value>;
  Consumer consumer(params, plan, smem);
  const QueryWork& work = consumer.work;
  // State of the previous query tile, whose output is complete except for one product.
  bool unfinished = false;
  Range attended;
  int32_t tile = 0;
  const auto finish = [&] {
    if constexpr (Consumer::kPlainSteps) settle(consumer);
    start_last_out<Config, kModifiers>(consumer, tile, attended);
    consumer.await_out();
    finish_last<Config, Element, kModifiers>(plan, consumer, consumer.softmax);
  };
  while (consumer.wait_query()) {
    if (!consumer.has_keys()) {
      if (unfinished) finish();
      unfinished = false;
      skip_query_tile<Element>(consumer);
      continue;
    }
    start_query_tile(consumer);
    OnlineSoftmax<1> unstored;  // the sums of the query tile before, with kStoresLate
    const bool stores_last = unfinished;
    if (unfinished) {
      const OnlineSoftmax<1> softmax = consumer.softmax;
      if constexpr (Consumer::kPlainSteps) settle(consumer);
      // A lambda, since a function of its own changed the machine code.
      const auto first_tile = [&](auto kind) {
        start_last_out<Config, kModifiers>(consumer, tile, attended);
        consumer.template first_tile<true, kind()>(work.tile);
      };
      // No other code should be fetched between tiles of a run of one segment: the instruction
      // cache is small.
      if (Consumer::kHasRuns && consumer.one_segment && consumer.in_run(work.tile)) {
        consumer.one_segment = true;
        first_tile(std::integral_constant<TileKind, TileKind::kInRun>{});
      } else {
        first_tile(std::integral_constant<TileKind, TileKind::kAny>{});
      }
      if constexpr (Consumer::kStoresLate) {
        unstored = softmax;
      } else {
        finish_last<Config, Element, kModifiers>(plan, consumer, softmax);
      }
    } else {
      consumer.template first_tile<false>(work.tile);
    }
    unfinished = true;
    attended = work.attended;
    tile = work.tile;
    if constexpr (Consumer::Modifier::kFixedTiles) {
      tile = fixed_tiles<Config>(consumer, tile);
      consumer.wait_value();  // in fixed_tiles(), it would take registers from the loop below
    }
    // An argument of attend_rest() instead would change the machine code of kernels with a bias.
    if constexpr (Consumer::kStoresLate) {
      tile = plain_tiles<Config>(consumer, tile, [&] {
        if (stores_last) finish_last<Config, Element, kModifiers>(plan, consumer, unstored);
      });
    } else {
      attend_rest<Config, kModifiers>(consumer, tile);
    }
    if constexpr (Config::kQueryStages > 1) consumer.release_query();
  }
  if (unfinished) finish();
  if constexpr (kChecksLate<Config, kModifiers>) {
    smem.to_redo->notify();
    redo_query_tiles<Config, Element>(params, plan, smem, consumer);
  }
}

}  // namespace jax_flash::sm90
