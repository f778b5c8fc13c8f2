// Computes scores a tile ahead in the sm_90 forward kernel, for consumers with registers for the
// scores of two tiles. The next tile's S and the last tile's P V overlap this tile's exponentials,
// which wait for neither.
//
// Used with two consumers, for calls without modifiers. Key tiles are taken from the last one on;
// if a window's left edge cuts the first one, that one is taken second.
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

// Returns the index-th of the key tiles from `first` to before `end`; indices begin at `first`,
// too. Tiles are taken from the last one on: the band's edges cut only the first ones taken.
template <typename Config>
__device__ __forceinline__ int32_t tile_from_end(int32_t first, int32_t end, int32_t index) {
  if constexpr (Config::kLeftCut) {
    if (index == first) return end - 1;
    return index == first + 1 ? first : end - (index - first);
  }
  return end - 1 - index;  // `first` is 0
}

template <typename Config, typename Element>
struct AheadConsumer : ForwardConsumer<Config, Element, kNoModifier> {
  using Base = ForwardConsumer<Config, Element, kNoModifier>;
  using Base::Base, Base::by_bits, Base::factor, Base::key_stage, Base::out, Base::query_stage,
      Base::smem, Base::softmax, Base::to_log2, Base::value_stage, Base::warp_row, Base::work;
  using typename Base::Scores;

  static constexpr int kStep = Config::kKeyGroups;
  // True if the first running maxima are guessed: if an edge cuts one tile at most, since each row
  // then attends to some key of the first one.
  static constexpr bool kGuesses = !Config::kSecondCut && !Base::kAlwaysExact;
  // True if the values of all tiles are converted, so that all P are float16.
  static constexpr bool kConvertsAll = kGuesses && Base::kConverts;

  Scores other_scores;  // alternates with `scores`

  // Guesses running maxima from some of the logits; sums and output are then examined after the
  // last key. Short calls take a fifth less time than if the greatest logits were found. Each of a
  // row's four threads finds the greatest of eight logits. The guess is the least of these four, so
  // that a single logit far above the others does not decide, plus kHeadroom in log2 units, since
  // other logits may be greater.
  static constexpr float kHeadroom = 8.0f;
  __device__ __forceinline__ void guess_maximum(const Scores& now) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float greatest = minus_infinity();
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        greatest = fmaxf(greatest, fmaxf(now[0][n][2 * half], now[0][n][2 * half + 1]));
      }
      // The least among the threads that have an allowed logit.
      float least = greatest == minus_infinity() ? -greatest : greatest;
      least = fminf(least, __shfl_xor_sync(0xffffffff, least, 1));
      least = fminf(least, __shfl_xor_sync(0xffffffff, least, 2));
      const float rise = to_log2 < 0x1p-100f ? 0.0f : kHeadroom * ptx::rcp_approx_ftz(to_log2);
      softmax.maximum[0][half] = least == -minus_infinity() ? -least : least + rise;
    }
  }

  // Returns the least sum of a thread's P of a row for which they are exact enough. float16 rounds
  // each P, even to 0, by up to 2^-25, and a thread has a quarter of the keys. Together these
  // errors may be as great as that of a P that is rounded to bfloat16, 2^-9 of the sum.
  __device__ __forceinline__ float least_sum() const {
    return static_cast<float>(work.attended.end - work.attended.first) * 0x1p-18f;
  }

  __device__ __forceinline__ void cut(Scores& now, int32_t index) const {
    const int32_t tile = tile_from_end<Config>(work.tile, work.end, index);
    if (!this->at_edge(tile)) return;
    const int32_t row0 = work.row0 + warp_row, col0 = tile * Config::kBlockKv;
    // In the other kernels, the branches of mask_pairs() cost more than they save (TUNING.md).
    if constexpr (Config::kSecondCut || Config::kKeyGroups > 1) {
      mask_edges(now, work.band, row0, col0);
    } else {
      mask_pairs(now, work.band, row0, col0);
    }
  }

  // Computes P of the index-th tile from its scores in `now`. This overlaps the last tile's P V,
  // unless kFirst, and the next tile's scores, which go to `next`. kCut: an edge may cut the tile.
  // kExact: running maxima rise to the greatest logits. kHalf: P is float16; kLastHalf: the last
  // tile's P is.
  //
  // A warp that starts a product stalls until the tensor cores accept it. There is therefore no
  // branch between the first product and the waits after the exponentials: the assembler then
  // interleaves products and exponentials, one product every so many exponentials.
  template <bool kFirst, bool kCut, bool kExact, bool kLastHalf, bool kHalf>
  __device__ __forceinline__ void step(Scores& now, Scores& next, int32_t index) {
    if constexpr (kCut) cut(now, index);
    bool rises = false;
    if constexpr (kFirst && kGuesses) {
      guess_maximum(now);
    } else if constexpr (kFirst || kCut || kExact) {
      rises = raise_to_greatest<false>(softmax, by_bits, now, to_log2, factor);
    }
    // In the last step, the tile's own scores are computed again and not used: this is cheaper than
    // a branch.
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
    // This wait precedes the wait for products, and its parity depends on all exponentials:
    // otherwise the assembler would move these past the wait for products. `flip` is 0, since sums
    // are not negative.
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

  // Processes the tiles from the index-th one on. No edge cuts them.
  template <bool kExact>
  __device__ __forceinline__ void go_on(int32_t index) {
    Scores& now = Config::kSecondCut ? this->scores : other_scores;
    Scores& next = Config::kSecondCut ? other_scores : this->scores;
    for (; index < work.end; index += kStep) {
      step<false, false, kExact, kConvertsAll, true>(now, next, index);
      index += kStep;
      if (index >= work.end) break;
      step<false, false, kExact, true, kConvertsAll>(next, now, index);
    }
  }

  // Processes a query tile's keys from the index-th tile on.
  template <typename Overlapped>
  __device__ __forceinline__ void attend(int32_t index, Overlapped overlapped) {
    this->wait_key();
    this->start_scores();
    this->read_description();
    this->template await_scores<0>();
    by_bits = false;
    this->is_half = is_converted<Config>(work.end - 1 - index);  // for the last tile
    step<true, true, false, false, kConvertsAll>(this->scores, other_scores, index);
    const auto clear_values = [&] {
      this->clear_values(tile_from_end<Config>(work.tile, work.end, index), work.attended);
    };
    clear_values();
    index += kStep;
    if constexpr (Config::kSecondCut) {
      if (index < work.end) {
        step<false, true, false, false, false>(other_scores, this->scores, index);
        if constexpr (Config::kLeftCut) clear_values();
      }
      index += kStep;
    }
    // If running maxima are guessed, sums do not show peaks.
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
    overlapped();
    this->await_out();
  }
};

}  // namespace jax_flash::sm90
