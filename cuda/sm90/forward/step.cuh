// Implements the step of a consumer of the sm_90 forward kernel: the work for one key tile.
// first_tile() processes a query tile's first key tile, next_tile() each later one. Both call the
// hooks of the kernel's modifier (sm90/forward/modifier.cuh). The order in next_tile() is:
//
//   start S of this tile; start P V of the last tile; prepare; await S; apply the modifier, raise
//   running maxima; exponentials; await the next tile's operands, then P V; check sums; convert P;
//   rescale O
//
// Invariants. A step begins with the last tile's P in registers and ends with this tile's P. At
// most one S and one P V are in flight. Each stage of K and V is released once. If sums are
// checked, K is released after the check, which may compute the scores again.
//
// Variants of the step have these operations in another order:
//
//   plain_step.cuh    without modifiers: sums are checked after the last key, and rescaling and the
//                     wait for V overlap the next scores; with kStoresLate, so does storing the
//                     output of the query tile before
//   soft_cap.cuh      next_capped_tile(), fixed_tiles(): exponentials relative to a running maximum
//                     of 0, computed from products directly
//   order_ahead.cuh   the next tile's scores are in flight, too
//   order_redo.cuh    nothing overlaps
#pragma once

#include <cstdint>

#include "sm90/forward/consumer.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/plain_step.cuh"
#include "sm90/forward/soft_cap.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::clear_values(
    int32_t tile, const Range& attended, int before) const {
  if constexpr (kHalfValues) return;  // float16 values are all finite
  const QueryWork& of = before == 0 ? work : work_before(before);
  const auto value_smem = smem.value(value_stage.stage);
  const auto clear = [&](auto make_allows) {
    clear_unattended<Config, Element>(value_smem, columns, make_allows, of.band, of.row0, tile);
  };
  // Avoids the divisions of BatchIndex, which are function calls.
  const auto clear_alone = [&] {
    clear([&] {
      return [&](int32_t row, int32_t col) {
        return allows_element<Config, kModifiers>(params, of.modifiers, of.band, row, col);
      };
    });
  };
  if constexpr (kHasRuns) {
    if (!one_segment) {
      if (smem.query_segments(query_tile(), works - 1 - before).count != 0) {
        zero_unattended<Config>(value_smem, unattended());
      } else {
        clear_alone();
      }
    }
  } else if constexpr (Modifier::kBits) {
    clear_alone();
  } else if (has_element_masks<kModifiers>(params)) {
    clear([&] {
      const LogitModifiers all = modifiers();
      return [all, this](int32_t row, int32_t col) { return all.allows(work.band, row, col); };
    });
  }
  if constexpr (Config::kKeyMask && !kClearsHolesLate) {
    const int64_t first = of.modifiers.mask;
    if (first != KeyMask::kNoHoles) zero_holes<Config>(value_smem, key_bits(first + tile));
  }
  zero_unattended<Config>(value_smem, tile, attended, plan.kv_len);
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <bool kOverlapsOut, TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::first_tile(
    int32_t tile, bool of_one_segment) {
  if constexpr (Modifier::kInScores) {
    uncut = uncut_tiles<Config::kBlockKv>(work.band, work.row0 + group_row());
  }
  const bool edge = is_cut(tile);
  if constexpr (kKind == TileKind::kInRun) {
    note = key_note(tile);
    one_segment = true;
  } else if constexpr (kHasRuns) {
    note = key_note(tile);
    one_segment = note.one_segment();
    Modifier::look_at(*this, tile);
  } else {
    one_segment = of_one_segment;
  }
  if constexpr (Modifier::kBits) look_ahead(tile);
  modifier.prepare(work, work.row0 + warp_row, tile, edge);
  await_scores<kOverlapsOut ? 1 : 0>();
  release_key();
  release_query_early(tile);
  softmax = OnlineSoftmax<1>();
  softmax.lift = kLift;
  by_bits = is_half = false;
  bool computed = false;
  if constexpr (Modifier::kSaturates) computed = first_fixed_tile<Config>(*this, tile, edge);
  if (!computed) {
    modify(scores, tile, edge);
    if constexpr (Modifier::kAddends) read_ahead(is_last(tile) ? -1 : tile + 1);
    raise_maximum();
    take_maxima();
    if constexpr (Modifier::kSaturates) fix_first_maxima<Config>(*this, tile, edge);
    if constexpr (Modifier::kFixedMaxima) {
      share_maximum(softmax);
      float shift[2];
      find_shift<true, 0>(softmax, to_log2, shift);
      exponentials_in_chains(softmax, scores, to_log2, modifier.addend(tile, shift));
    } else {
      exponentials();
    }
  }
  if constexpr (Modifier::kBits) {
    look_ahead(tile + 1);
    find_attended_columns(modifier.all_allowed);
  }
  Modifier::drop_some(*this, tile);
  if constexpr (kWaitsAhead) {
    wait_ahead_after_exponentials(*this, tile, kOverlapsOut ? 1 : 0);
    if constexpr (kOverlapsOut) await_out();
    convert();
  } else if constexpr (kOverlapsOut) {
    wait_next_value_after_exponentials();
    await_out();
    convert();
  } else {
    convert();
    wait_value();
  }
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <TileKind kKind>
__device__ __forceinline__ void
ForwardConsumer<Config, Element, kModifiers, Value>::start_next_scores(int32_t tile) {
  if constexpr (Modifier::kAddends && !Modifier::kInScores) return;
  if constexpr (!kWaitsAhead) wait_key();
  if constexpr (kHasRuns) note = key_note(tile);
  if constexpr (kKind == TileKind::kInRun) one_segment = true;  // for the compiler
  start_scores();
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::start_last_out(
    int32_t last, int32_t tile, bool inner, bool of_one_segment, KeyTileNote* next_note) {
  if (!Modifier::kInScores || !inner) clear_values(last, work.attended);
  // The wait is a branch. Without one, P V would be started directly after S, and before another
  // warpgroup's S.
  if constexpr (kHalfValues && kKind != TileKind::kInner) wait_value();
  if constexpr (kKind != TileKind::kInRun) one_segment = of_one_segment;
  if constexpr (!kChained) *next_note = key_note(tile);
  if constexpr (kHasRuns) Modifier::look_at(*this, tile);
  start_out_part<0>(0);
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::apply(
    int32_t tile, bool edge, bool inner, bool whole, bool careful, bool& rises) {
  if (whole) {
    if (!Modifier::kInScores || !inner) modify(scores, tile, edge);
    if constexpr (Modifier::kInScores) {
      if (careful) {
        rises = raise_maximum();
        take_maxima();
      }
    } else {
      rises = careful && raise_maximum();
    }
  } else if constexpr (Modifier::kApproximates) {
    rises = careful && raise_capped_maximum(*this);
  }
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::exponentials(
    int32_t tile, bool whole, bool assumes_small, bool longer, bool& great) {
  const auto overlapped = [&](bool all_allowed) {
    if constexpr (Modifier::kBits) {
      look_ahead(tile + 1);
      find_attended_columns(all_allowed);
    }
  };
  if (whole) {
    overlapped(modifier.all_allowed);
    exponentials_overlapped<0>();
  } else if constexpr (kModifiers != kNoModifier) {
    great = modifier.template exponentials<kLift>(scores, softmax, to_log2, longer, overlapped) &&
            assumes_small;
  }
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void
ForwardConsumer<Config, Element, kModifiers, Value>::compute_logits_again(
    int32_t tile, bool edge, const float (&before)[2]) {
  softmax.sum[0][0] = before[0];
  softmax.sum[0][1] = before[1];
  compute_scores_again(tile);
  modify(scores, tile, edge, true);
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::prepare(
    int32_t tile, bool edge) {
  if constexpr (kKind == TileKind::kInner) {
    modifier.prepare_inner();
  } else {
    modifier.prepare(work, work.row0 + warp_row, tile, edge);
  }
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::next_tile(
    int32_t last, int32_t tile, bool of_one_segment, KeyTileNote* next_note) {
  if constexpr (Modifier::kSaturates) return next_capped_tile<Config>(*this, last, tile);
  constexpr bool kInner = kKind == TileKind::kInner;
  constexpr bool kInScores = Modifier::kInScores;
  bool inner = kInner;  // true if no edge cuts the tiles
  if constexpr (kInScores) inner = last >= uncut.first && tile < uncut.end;
  const bool edge = !inner && (kInScores || is_cut(tile));  // computed before the wait
  start_next_scores<kKind>(tile);
  start_last_out<kKind>(last, tile, inner, of_one_segment, next_note);
  prepare<kKind>(tile, edge);
  await_scores<1>();
  bool careful = !kInner;
  if constexpr (!kOptimistic) {
    release_key();
  } else if constexpr (!kInner) {
    careful = is_careful(tile);
  }
  if constexpr (!kInner || kReadsQueryAgain) release_query_early(tile);
  // True if all logits must be computed before the exponentials.
  bool whole = !kInner;
  bool assumes_small = false, longer = false;  // see ForwardModifier::judge()
  if constexpr (Modifier::kJudges) {
    bool cut = edge || (kHasRuns && !one_segment);
    if constexpr (Modifier::kBits) cut = !modifier.all_allowed;
    modifier.template judge<kOptimistic>(scores, cut, careful, whole, assumes_small, longer);
  }
  bool rises = false;
  if constexpr (!kInner) apply(tile, edge, inner, whole, careful, rises);
  const float before[2] = {softmax.sum[0][0], softmax.sum[0][1]};
  softmax.sum[0][0] = softmax.sum[0][1] = 0.0f;
  bool great = false;
  if constexpr (kInner) {
    modifier.template inner_exponentials<kLift>(scores, softmax);
  } else {
    exponentials(tile, whole, assumes_small, longer, great);
  }
  if constexpr (Modifier::kAddends) read_ahead(is_last(tile) ? -1 : tile + 1);
  const float greatest = Modifier::kAddsInfinity
                             ? ptx::max_nan(softmax.sum[0][0], softmax.sum[0][1])
                             : fmaxf(softmax.sum[0][0], softmax.sum[0][1]);
  softmax.sum[0][0] += before[0];
  softmax.sum[0][1] += before[1];
  bool exceeded = false;
  if constexpr (kInScores) {  // one vote serves the check and the parity of the wait
    exceeded = !careful && __any_sync(0xffffffff, greatest > kSumLimit);
    await_next(tile, exceeded && plan.q_len < 0 ? 1 : 0);
  } else {
    await_next_after_exponentials(tile);
  }
  await_out();
  if constexpr (kOptimistic) {
    // With kAddsInfinity, elements that a mask forbids may also make sums NaN.
    const bool again =
        Modifier::kAddsInfinity ? !(greatest <= kSumLimit) : greatest > kSumLimit || great;
    if constexpr (!kInScores) exceeded = !careful && __any_sync(0xffffffff, again);
    if (exceeded) [[unlikely]] {
      bool anew = sums_too_great(softmax);
      if constexpr (Modifier::kAddsInfinity) {
        anew = anew || __any_sync(0xffffffff, greatest != greatest);
      }
      if constexpr (Modifier::kApproximates) modifier.reject(great, anew);
      if (anew) {
        compute_logits_again(tile, edge, before);
        rises = raise_maximum();
        take_maxima();
        exponentials();
        careful_tiles = kCarefulTiles;
      } else {
        raise_to_peaks();
        rises = true;
      }
    } else if (careful_tiles > 0) {
      careful_tiles = rises ? kCarefulTiles : careful_tiles - 1;
    }
    release_key();
  }
  Modifier::drop_some(*this, tile);
  convert();
  if (rises) rescale();
}

}  // namespace jax_flash::sm90
