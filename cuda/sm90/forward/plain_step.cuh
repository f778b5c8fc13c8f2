// Implements the step for a key tile in the sm_90 forward kernel without modifiers, for
// consumers that chain query tiles. sm90/forward/step.cuh lists the differences to the other steps.
//
// A warp goes from its exponentials to the next scores as soon as it can. Therefore a step begins
// only when its keys have arrived, and the rescaling before a product may be pending until
// settle().
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/exact_maximum.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/redo.cuh"
#include "sm90/forward/values.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Returns whether running maxima must follow the greatest logits after a query tile's first tile.
// This is so if the sums of one of the warpgroup's warps look peaked, or a row has had no key. The
// answer is the same for the whole warpgroup, whose warps start products together.
template <typename Config, typename Consumer>
__device__ __forceinline__ bool warpgroup_sees_peaks(const Consumer& consumer) {
  bool peaked = sums_look_peaked<Config>(consumer.softmax) || !consumer.softmax.ready();
  if constexpr (Consumer::kConverts) {  // or a row's other logits are far below its running maximum
    const float sum = fminf(consumer.softmax.sum[0][0], consumer.softmax.sum[0][1]);
    peaked = peaked || (sum > 0.0f && sum < kFarBelow);
  }
  const bool found = ptx::barrier_any(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup, peaked);
  // The compiler knows that a vote has the same result in all lanes, but not that a barrier has.
  return __any_sync(0xffffffff, found);
}

// Waits for the next tile's keys or, if `tile` is a query tile's last, for its V, for which
// settle() waits in any case. `products`: number of P V in flight; `keys`: number of key tiles
// held. `flip` is 0 and inverts the barrier's parity.
template <typename Consumer>
__device__ __forceinline__ void wait_ahead(const Consumer& consumer, int32_t tile, int products,
                                           int keys, uint32_t flip) {
  const auto value = consumer.value_stage.next(products);
  const auto key = keys == 0 ? consumer.key_stage : consumer.key_stage.next(keys);
  const bool last = consumer.is_last(tile);
  ptx::mbarrier_wait(
      last ? consumer.smem.value_full(value.stage) : consumer.smem.key_full(key.stage),
      (last ? value.parity : key.parity) ^ flip);
}
// Does so with a parity that depends on the exponentials: see ForwardConsumer's
// wait_next_value_after_exponentials().
template <typename Consumer>
__device__ __forceinline__ void wait_ahead_after_exponentials(const Consumer& consumer,
                                                              int32_t tile, int products,
                                                              int keys = 0) {
  const auto& sum = consumer.softmax.sum[0];
  const uint32_t flip = __any_sync(0xffffffff, fminf(sum[0], sum[1]) < 0.0f);
  wait_ahead(consumer, tile, products, keys, flip);
}

// Rescales O and waits for V, so that P V of the last tile can start. Overlaps the next scores.
template <typename Consumer>
__device__ __forceinline__ void settle(Consumer& consumer) {
  if (consumer.rises) consumer.rescale();
  consumer.rises = false;
  consumer.wait_value();
}

// Computes the exponentials of a tile, and their sums. Starts the further parts of P V in between
// (start_out_part()).
template <int kPart, bool kHalf, typename Consumer, typename Addend>
__device__ __forceinline__ void plain_exponentials(Consumer& consumer, const Addend& addend,
                                                   float (&sums)[4]) {
  static_assert(!Consumer::kByDifference);
  constexpr int kN = Consumer::kN, kParts = Consumer::kOutParts;
  exponentials_in_chains<kPart * kN / kParts, (kPart + 1) * kN / kParts>(
      consumer.scores, consumer.to_log2, addend, sums);
  if constexpr (kPart + 1 < kParts) {
    // `zero` is 0, which the compiler cannot know. Otherwise it would start the product before the
    // exponentials.
    const uint32_t zero = __any_sync(0xffffffff, fminf(sums[0], sums[2]) < 0.0f);
    consumer.template start_out_part<kPart + 1, kHalf>(zero);
    plain_exponentials<kPart + 1, kHalf>(consumer, addend, sums);
  }
}

// Takes the place of ForwardConsumer::next_tile(). The keys of `tile` have arrived, and those of
// the next one, if there is one, have arrived when this returns. Rescaling and the wait for V,
// which the last tile's P V needs, overlap the next scores (settle()).
//
// kExact: running maxima rise to the rows' greatest logits. kHalf: P V of the last tile is in
// float16. overlapped() is called while the scores are computed, and before P V is started, which
// may overwrite an output that it stores.
template <bool kExact, bool kHalf, typename Consumer, typename Overlapped>
__device__ __forceinline__ void next_plain_tile(Consumer& consumer, int32_t last, int32_t tile,
                                                Overlapped overlapped) {
  auto& softmax = consumer.softmax;
  const bool edge = consumer.is_cut(tile);  // computed before the wait
  consumer.start_scores();
  overlapped();
  if constexpr (kExact) {
    settle(consumer);
  } else {
    consumer.wait_value();
  }
  consumer.clear_values(last, consumer.work.attended);
  consumer.template start_out_part<0, kHalf>(0);
  consumer.template await_scores<1>();
  consumer.release_key();
  consumer.release_query_early(tile);
  consumer.modify(consumer.scores, tile, edge);
  if constexpr (kExact) consumer.rises = consumer.raise_maximum();
  float shift[2];
  find_shift<kExact || Consumer::Modifier::kFixedMaxima,
             kExact && Consumer::kConverts ? kPeakLift : 0>(softmax, consumer.to_log2, shift);
  float sums[4] = {softmax.sum[0][0], 0.0f, softmax.sum[0][1], 0.0f};
  plain_exponentials<0, kHalf>(consumer, consumer.modifier.addend(tile, shift), sums);
  softmax.sum[0][0] = sums[0] + sums[1];
  softmax.sum[0][1] = sums[2] + sums[3];
  wait_ahead_after_exponentials(consumer, tile, 1);
  consumer.await_out();
  consumer.template convert<Consumer::kConverts && !kHalf>();
}

// Multiplies probabilities, which are bfloat16, and their sums so far by 2^kPeakLift.
template <typename Consumer>
__device__ __forceinline__ void lift_weights(Consumer& consumer) {
  auto& softmax = consumer.softmax;
  softmax.lift = kPeakLift;
  softmax.sum[0][0] *= kPeakLifted;
  softmax.sum[0][1] *= kPeakLifted;
#pragma unroll
  for (auto& fragment : consumer.probabilities) {
#pragma unroll
    for (uint32_t& pair : fragment) {
      auto& values = reinterpret_cast<__nv_bfloat162&>(pair);
      values = __hmul2(values, __float2bfloat162_rn(kPeakLifted));
    }
  }
}

// Processes a query tile's key tiles after the first one. Returns the last one, whose P V has not
// been started.
template <typename Config, bool kExact, typename Consumer>
__device__ __forceinline__ int32_t plain_tiles_after(Consumer& consumer, int32_t tile) {
  for (;;) {
    if (consumer.is_last(tile)) return tile;
    next_plain_tile<kExact, false>(consumer, tile, tile + 1, [] {});
    ++tile;
    if constexpr (Consumer::kConverts) {  // every second one
      consumer.is_half = true;
      if (consumer.is_last(tile)) return tile;
      next_plain_tile<kExact, true>(consumer, tile, tile + 1, [] {});
      consumer.is_half = false;
      ++tile;
    }
  }
}
template <typename Config, typename Consumer>
__device__ __forceinline__ int32_t plain_tiles(Consumer& consumer, int32_t tile) {
  if (consumer.is_last(tile)) return tile;
  if constexpr (Consumer::Modifier::kFixedMaxima) {
    return plain_tiles_after<Config, false>(consumer, tile);
  } else if (Consumer::kAlwaysExact || warpgroup_sees_peaks<Config>(consumer)) {
    if constexpr (Consumer::kConverts) lift_weights(consumer);
    return plain_tiles_after<Config, true>(consumer, tile);
  } else {
    return plain_tiles_after<Config, false>(consumer, tile);
  }
}

// Processes a query tile's key tiles after the first one, with kStoresLate. Calls store_last(),
// which stores the output of the query tile before: while the scores of the second tile are
// computed, or at once if there is no second tile or running maxima must be exact, since a step of
// its own would be more code. Returns the last tile.
template <typename Config, typename Consumer, typename Store>
__device__ __forceinline__ int32_t plain_tiles(Consumer& consumer, int32_t tile, Store store_last) {
  static_assert(Consumer::kStoresLate);
  const bool is_last = consumer.is_last(tile);
  const bool exact = !is_last && warpgroup_sees_peaks<Config>(consumer);
  if (is_last || exact) {
    store_last();
    return is_last ? tile : plain_tiles_after<Config, true>(consumer, tile);
  }
  next_plain_tile<false, false>(consumer, tile, tile + 1, store_last);
  return plain_tiles_after<Config, false>(consumer, tile + 1);
}

}  // namespace jax_flash::sm90
