// Implements the steps of a consumer of the sm_90 forward kernel with a tile of keys, and what
// overlaps what in them. Those of a scores-ahead consumer are in sm90/forward/order_ahead.cuh.
#pragma once

#include <cstdint>

#include "sm90/forward/bias.cuh"
#include "sm90/forward/consumer.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/plain_step.cuh"
#include "sm90/forward/soft_cap.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::clear_values(
    int32_t tile, const RowRange& attended, int before) const {
  if constexpr (kHalfValues) return;  // float16 values are all finite
  const QueryWork& of = before == 0 ? work : work_before(before);
  const auto value_smem = smem.value(value_stage.stage);
  const auto clear = [&](auto make_allows) {
    clear_unattended<Config, Element>(value_smem, columns, make_allows, of.band, of.row0, tile);
  };
  // Without the divisions of BatchIndex, which are function calls.
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
  } else if constexpr (Modified::kBits) {
    clear_alone();
  } else if (has_element_masks<kModifiers>(params)) {
    clear([&] {
      const LogitModifiers all = modifiers();
      return [all, this](int32_t row, int32_t col) { return all.allows(work.band, row, col); };
    });
  }
  zero_unattended<Config>(value_smem, tile, attended, plan.kv_len);
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <bool kBesideOut, TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::first_tile(
    int32_t tile, bool of_one_segment) {
  if constexpr (Modified::kInScores) {
    uncut = uncut_tiles<Config::kBlockKv>(work.band, work.row0 + group_row());
  }
  const bool edge = at_edge(tile);
  if constexpr (kKind == TileKind::kInRun) {
    note = key_note(tile);
    one_segment = true;
  } else if constexpr (kHasRuns) {
    note = key_note(tile);
    one_segment = note.one_segment();
    look_at_segments(tile);
  } else {
    one_segment = of_one_segment;
  }
  if constexpr (Modified::kBits) look_ahead(tile);
  modified.prepare(work, work.row0 + warp_row, tile, edge);
  await_scores<kBesideOut ? 1 : 0>();
  release_key();
  release_query_early(tile);
  softmax = OnlineSoftmax<1>();
  softmax.lift = kLift;
  by_bits = is_half = false;
  bool computed = false;
  if constexpr (Modified::kSaturates) computed = first_fixed_tile<Config>(*this, tile, edge);
  if (!computed) {
    modify(scores, tile, edge);
    if constexpr (Modified::kAddends) read_ahead(is_last(tile) ? -1 : tile + 1);
    raise_reference();
    take_references();
    if constexpr (Modified::kSaturates) fix_first_references<Config>(*this, tile, edge);
    exponentials();
  }
  if constexpr (Modified::kBits) {
    look_ahead(tile + 1);
    find_attended_columns(modified.all_allowed);
  }
  Modified::drop_some(*this, tile);
  if constexpr (kWaitsAhead) {
    wait_ahead_after_exponentials(*this, tile, kBesideOut ? 1 : 0);
    if constexpr (kBesideOut) await_out();
    convert();
  } else if constexpr (kBesideOut) {
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
  if constexpr (Modified::kAddends && !Modified::kInScores) return;
  if constexpr (!kWaitsAhead) wait_key();
  if constexpr (kHasRuns) note = key_note(tile);
  if constexpr (kKind == TileKind::kInRun) one_segment = true;  // so that the compiler knows
  start_scores();
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::start_last_out(
    int32_t last, int32_t tile, bool inner, bool of_one_segment, KeyTileNote* next_note) {
  if (!Modified::kInScores || !inner) clear_values(last, work.attended);
  // A branch; otherwise O would be started right after S, and before another warpgroup's S.
  if constexpr (kHalfValues && kKind != TileKind::kBiasBeside) wait_value();
  if constexpr (kKind != TileKind::kInRun) one_segment = of_one_segment;
  if constexpr (!kChained) *next_note = key_note(tile);
  if constexpr (kHasRuns) look_at_segments(tile);
  start_out_part<0>(0);
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::apply(
    int32_t tile, bool edge, bool inner, bool whole, bool careful, bool& rises) {
  if (whole) {
    if (!Modified::kInScores || !inner) modify(scores, tile, edge);
    if constexpr (Modified::kInScores) {
      if (careful) {
        rises = raise_reference();
        take_references();
      }
    } else {
      rises = careful && raise_reference();
    }
  } else if constexpr (Modified::kApproximates) {
    rises = careful && raise_capped_reference(*this);
  }
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::exponentials(
    int32_t tile, bool whole, bool assumes_small, bool longer, bool& great) {
  const auto beside = [&](bool all_allowed) {
    if constexpr (Modified::kBits) {
      look_ahead(tile + 1);
      find_attended_columns(all_allowed);
    }
  };
  if (whole) {
    beside(modified.all_allowed);
    exponentials_beside_out<0>();
  } else if constexpr (kModifiers != kNoModifier) {
    great = modified.template exponentials<kLift>(scores, softmax, to_log2, longer, beside) &&
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
  if constexpr (kKind == TileKind::kBiasBeside) {
    modified.wait_bias();
  } else {
    modified.prepare(work, work.row0 + warp_row, tile, edge);
  }
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <TileKind kKind>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::next_tile(
    int32_t last, int32_t tile, bool of_one_segment, KeyTileNote* next_note) {
  if constexpr (Modified::kSaturates) return next_capped_tile<Config>(*this, last, tile);
  constexpr bool kBiasBeside = kKind == TileKind::kBiasBeside;
  constexpr bool kInScores = Modified::kInScores;
  bool inner = kBiasBeside;  // true if no edge cuts the tiles
  if constexpr (kInScores) inner = last >= uncut.first && tile < uncut.end;
  const bool edge = !inner && (kInScores || at_edge(tile));  // computed before the wait
  start_next_scores<kKind>(tile);
  start_last_out<kKind>(last, tile, inner, of_one_segment, next_note);
  prepare<kKind>(tile, edge);
  await_scores<1>();
  bool careful = !kBiasBeside;
  if constexpr (!kOptimistic) {
    release_key();
  } else if constexpr (!kBiasBeside) {
    careful = is_careful(tile);
  }
  if constexpr (!kBiasBeside || kReadsQueryAgain) release_query_early(tile);
  // True if all logits must be computed before the exponentials.
  bool whole = !kBiasBeside;
  bool assumes_small = false, longer = false;  // see ForwardModifier::judge()
  if constexpr (Modified::kBits || Modified::kApproximates) {
    modified.template judge<kOptimistic>(scores, edge, careful, whole, assumes_small, longer);
  }
  bool rises = false;
  if constexpr (!kBiasBeside) apply(tile, edge, inner, whole, careful, rises);
  const float before[2] = {softmax.sum[0][0], softmax.sum[0][1]};
  softmax.sum[0][0] = softmax.sum[0][1] = 0.0f;
  bool great = false;
  if constexpr (kBiasBeside) {
    modified.template biased_exponentials<kLift>(scores, softmax);
  } else {
    exponentials(tile, whole, assumes_small, longer, great);
  }
  if constexpr (Modified::kAddends) read_ahead(is_last(tile) ? -1 : tile + 1);
  const float greatest = Modified::kAddsInfinity
                             ? ptx::max_nan(softmax.sum[0][0], softmax.sum[0][1])
                             : fmaxf(softmax.sum[0][0], softmax.sum[0][1]);
  softmax.sum[0][0] += before[0];
  softmax.sum[0][1] += before[1];
  bool exceeded = false;
  if constexpr (kInScores) {  // uses the vote that exists already
    exceeded = !careful && __any_sync(0xffffffff, greatest > kSumLimit);
    await_next(tile, exceeded && plan.q_len < 0 ? 1 : 0);
  } else {
    await_next_after_exponentials(tile);
  }
  await_out();
  if constexpr (kOptimistic) {
    // NaN may also come from elements that a mask forbids.
    const bool again =
        Modified::kAddsInfinity ? !(greatest <= kSumLimit) : greatest > kSumLimit || great;
    if constexpr (!kInScores) exceeded = !careful && __any_sync(0xffffffff, again);
    if (exceeded) [[unlikely]] {
      bool anew = sums_too_great(softmax);
      if constexpr (Modified::kAddsInfinity) {
        anew = anew || __any_sync(0xffffffff, greatest != greatest);
      }
      if constexpr (Modified::kApproximates) modified.reject(great, anew);
      if (anew) {
        compute_logits_again(tile, edge, before);
        rises = raise_reference();
        take_references();
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
  Modified::drop_some(*this, tile);
  convert();
  if (rises) rescale();
}

template <typename Config, typename Element, uint32_t kModifiers, typename Value>
template <typename Beside>
__device__ __forceinline__ void ForwardConsumer<Config, Element, kModifiers, Value>::attend(
    int32_t tile, Beside beside) {
  wait_key();
  start_scores();
  read_description();
  first_tile<false>(tile);
  for (; !is_last(tile); tile += Config::kKeyGroups) {
    next_tile(tile, tile + Config::kKeyGroups);
  }
  clear_values(tile, work.attended);
  start_out();
  beside();
  await_out();
}

}  // namespace jax_flash::sm90
