// A consumer of the sm_90 forward kernel with registers for the scores of two tiles: the next
// tile's scores and the last one's part of the output are computed beside this tile's exponentials,
// and it waits for neither. For two consumers, and calls without modifiers or a left edge.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plain_step.cuh"
#include "sm90/forward/values.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Tiles are taken from the last one on: an edge cuts off a part of the first ones only.
__device__ __forceinline__ int32_t tile_from_end(int32_t end, int32_t index) {
  return end - 1 - index;
}

template <typename Config, typename Element>
struct AheadConsumer : ForwardConsumer<Config, Element, kNoModifier> {
  using Base = ForwardConsumer<Config, Element, kNoModifier>;
  using Base::Base, Base::by_bits, Base::factor, Base::key_stage, Base::out, Base::query_stage,
      Base::smem, Base::softmax, Base::to_log2, Base::value_stage, Base::warp_row, Base::work;
  using typename Base::Scores;

  static constexpr int kStep = Config::kKeyGroups;
  // For short calls: whether the first references are guessed.
  static constexpr bool kGuesses = !Config::kSecondCut && !Base::kAlwaysExact;

  Scores other_scores;  // `scores` and these in turn

  // From some of the logits, where sums and output are looked at behind the last key: for each row
  // the least of what its four threads have as the greatest of eight, so that a single logit far
  // above the others is not it; and 2^kHeadroom times as much, since others may be greater.
  static constexpr float kHeadroom = 8.0f;
  __device__ __forceinline__ void guess_reference(const Scores& now) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float greatest = minus_infinity();
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        greatest = fmaxf(greatest, fmaxf(now[0][n][2 * half], now[0][n][2 * half + 1]));
      }
      float least = greatest == minus_infinity() ? -greatest : greatest;  // of those that have any
      least = fminf(least, __shfl_xor_sync(0xffffffff, least, 1));
      least = fminf(least, __shfl_xor_sync(0xffffffff, least, 2));
      const float rise = to_log2 == 0.0f ? 0.0f : kHeadroom * ptx::rcp_approx_ftz(to_log2);
      softmax.reference[0][half] = least == -minus_infinity() ? -least : least + rise;
    }
  }

  __device__ __forceinline__ void cut(Scores& now, int32_t index) const {
    const int32_t tile = tile_from_end(work.end, index);
    if (this->at_edge(tile)) {
      mask_edges(now, work.band, work.row0 + warp_row, tile * Config::kBlockKv);
    }
  }

  // From the scores of the index-th tile, in `now`, to its probabilities; with the product of the
  // last ones, unless kFirst, and the next tile's scores, to `next`, beside. An edge may cut the
  // tile if kCut; references rise to the greatest logits if kExact. kHalf: the probabilities are
  // float16; kLastHalf: the last ones.
  //
  // A warp that starts a product stops until the tensor cores take it. So there is no branch from
  // the first product to the wait for all of them: the assembler then mixes products and
  // exponentials, one of the former every so many of the latter.
  template <bool kFirst, bool kCut, bool kExact, bool kLastHalf, bool kHalf>
  __device__ __forceinline__ void step(Scores& now, Scores& next, int32_t index) {
    if constexpr (kCut) cut(now, index);
    bool rises = false;
    if constexpr (kFirst && kGuesses) {
      guess_reference(now);
    } else if constexpr (kFirst || kCut || kExact) {
      rises = raise_to_greatest<false>(softmax, by_bits, now, to_log2, factor);
    }
    // Behind the last tile its own again, for nothing: cheaper than a branch.
    auto behind = key_stage;
    behind.stage += index + kStep < work.end ? kStep : 0;
    behind.parity ^= behind.stage / Config::kStages & 1;
    behind.stage %= Config::kStages;
    ptx::mbarrier_wait(smem.key_full(behind.stage), behind.parity);
    this->start_scores(next, behind.stage);
    if constexpr (!kFirst) this->template start_out<Base::kConverts && kLastHalf>();
    if constexpr (kExact && Base::kConverts) {
      float shift[2];
      find_shift<true, kPeakLift>(softmax, to_log2, shift);
      exponentials_in_chains(softmax, now, to_log2, shift);
    } else {
      this->exponentials(now);
    }
    // Before the wait for products, on a parity that depends on all exponentials in a way that
    // never matters: the assembler would move these behind it.
    const uint32_t flip =
        __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
    const auto next_value = kFirst ? value_stage : value_stage.next(kStep);
    ptx::mbarrier_wait(smem.value_full(next_value.stage), next_value.parity ^ flip);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(next[0]);
    if constexpr (!kFirst) {
      ptx::wgmma_results(out[0]);
      arrive_warp(smem.value_empty(value_stage.stage));
      value_stage.advance(kStep);
      if (rises) this->rescale();
    }
    this->release_key();
    this->template convert<Base::kConverts && kHalf>(now);
  }

  // The tiles from the index-th one on, which no edge cuts.
  template <bool kExact>
  __device__ __forceinline__ void go_on(int32_t index) {
    Scores& now = Config::kSecondCut ? this->scores : other_scores;
    Scores& next = Config::kSecondCut ? other_scores : this->scores;
    for (; index < work.end; index += kStep) {
      step<false, false, kExact, false, true>(now, next, index);
      index += kStep;
      if (index >= work.end) break;
      step<false, false, kExact, true, false>(next, now, index);
    }
  }

  // A query tile's keys from the index-th tile on.
  template <typename Beside>
  __device__ __forceinline__ void attend(int32_t index, Beside beside) {
    this->wait_key();
    this->start_scores();
    this->read_description();
    this->template await_scores<0>();
    by_bits = false;
    this->is_half = is_converted<Config>(work.end - 1 - index);  // of the last tile
    step<true, true, false, false, false>(this->scores, other_scores, index);
    this->clear_values(tile_from_end(work.end, index), work.attended);
    index += kStep;
    if constexpr (Config::kSecondCut) {
      if (index < work.end)
        step<false, true, false, false, false>(other_scores, this->scores, index);
      index += kStep;
    }
    // Where references are guessed, sums do not tell of peaks.
    if (Base::kAlwaysExact ||
        (!kGuesses && index < work.end && warpgroup_sees_peaks<Config>(*this))) {
      if constexpr (Base::kConverts) {
        lift_weights(*this);
        factor[0][0] = factor[0][1] = kPeakLifted;
        this->rescale();
      }
      go_on<true>(index);
    } else {
      go_on<false>(index);
    }
    this->start_out();
    beside();
    this->await_out();
  }
};

}  // namespace jax_flash::sm90
