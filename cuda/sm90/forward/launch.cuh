// Launches the forward pass of the sm_90 family: the kernel for the chosen row of plan/recipes.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "modifiers/kernels.h"
#include "params.h"
#include "plan/choice.h"
#include "plan/recipes.h"
#include "sm90/decode/kernel.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/columns.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/half_values.cuh"
#include "sm90/forward/kernel.cuh"
#include "sm90/forward/key_mask.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward/short.cuh"
#include "sm90/kernels.h"
#include "status.h"
#include "tile/launch.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers>
Status launch_forward_config(const Forward& params, const SegmentSpans& spans,
                             cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t q_tiles = ceil_div(shape.q_len, Config::kBlockQ);
  const int64_t tiles = q_tiles * shape.heads * shape.batch;
  if (tiles == 0) return {};
  MapsOf<Config> maps;
  Status status = make_forward_maps(params, Config::QueryTile::kRows, Config::kBlockKv, maps);
  if (!status.ok()) return status;
  int sms = 0;
  if (status = multiprocessors(sms); !status.ok()) return status;
  const QueryTileSchedule schedule(
      shape, static_cast<int32_t>(q_tiles),
      JAX_FLASH_SM90_PAIRED && params.options.is_causal && tiles > sms);
  // Blocks are persistent, since starting one takes as long as some key tiles. For very long
  // units this time is negligible, and each unit has a block of its own: the hardware then
  // distributes blocks as multiprocessors become free, also while other kernels, such as
  // collectives, occupy some of these.
  const bool is_long = int64_t{shape.kv_len} * Config::kHeadDim >= JAX_FLASH_SM90_LONG_UNIT;
  // True if blocks take units in turn, by a counter: with segments.
  constexpr bool kInTurn = ForwardModifier<Config, Element, kModifiers>::kSkips;
  // A block of its own for a left-over unit breaks the chain of query tiles, if there is one.
  constexpr double kMostRest = kInTurn || !JAX_FLASH_SM90_REST_APART ? 0.0
                               : Config::kScoresAhead                ? 0.8
                                                                     : 0.6;
  using Modifier = ForwardModifier<Config, Element, kModifiers>;
  constexpr bool kSaturates = Modifier::kSaturates;
  constexpr bool kProducts = kModifiers == kNoModifier || Modifier::kFixedMaxima;
  ForwardPlan plan(params, schedule, !kProducts && has_natural_logits(params), kSaturates);
  const int32_t batch_shift = is_matrix(kModifiers) ? plan.modifiers.batch_shift : 0;
  if (kInTurn && spans.query) {
    plan.schedule.take_in_turn(sms);
  } else if (is_long) {
    plan.schedule.set_apart(sms, batch_shift);
  } else {
    deal(plan.schedule, sms, kMostRest, batch_shift);
  }
  // The scale is applied to Q; bias_in_scores() has made sure that it is a power of two.
  if (Modifier::kInScores) {
    plan.modifiers.query_factor = params.options.scale;
  }
  if constexpr (Config::kBiasBoxes) {
    status = make_bias_map<Config>(params, maps);
    if (!status.ok()) return status;
  }
  Forward adapted = params;
  adapted.options.scale /= plan.modifiers.query_factor;  // 1 if Q is not multiplied
  SkipsOf<Config> skips;
  // True if other kernels precede it.
  bool follows = spans.query != nullptr || Config::kMaskWords || Config::kKeyMask;
  if constexpr (Config::kKeyMask) {
    static_assert(Config::kBlockKv == mask_words_keys(Config::kHeadDim));
    status = launch_key_mask<Config::kBlockKv>(params, skips, stream);
    if (!status.ok()) return status;
    adapted.mask = {};
    adapted.mask.data = const_cast<KeyBits*>(skips.bits);
  } else if constexpr (Config::kMaskWords) {
    static_assert(Config::kBlockKv == mask_words_keys(Config::kHeadDim));
    status = launch_mask_words<Config::kBlockKv>(adapted, skips, stream);
    if (!status.ok()) return status;
  } else {
    skips = spans;
  }
  HalfValuesOf<Config, Element, kModifiers> half_values;
  if constexpr (kReadsHalfValues<Config, Element, kModifiers>) {
    // `params` still has the mask's bytes.
    status = launch_half_values(params, MaskWords::bytes(shape, params.mask), follows,
                                Config::kBlockKv, stream, half_values);
    if (!status.ok()) return status;
    follows = follows || half_values.bad != nullptr;
  }
  // If it `follows` other kernels, the kernel begins while spans, the mask's words or converted
  // values are still being computed (griddepcontrol).
  return launch_grid(follows, "sm90::forward_kernel", shape,
                     forward_kernel<Config, Element, kModifiers>, plan.schedule.grid(),
                     Config::kThreads, Config::kSmemBytes, stream, plan, maps, adapted, skips,
                     half_values);
}

// The configuration for a row of kRecipes.
template <int kRow>
using RowConfig =
    ForwardConfig<kRecipes[kRow].head_dim, kRecipes[kRow].value_dim, kRecipes[kRow].consumers,
                  kRecipes[kRow].keys, kRecipes[kRow].key_groups, kRecipes[kRow].ahead,
                  kRecipes[kRow].bias, kRecipes[kRow].fewer_values, kRecipes[kRow].mask_words()>;

// Returns whether the instance compiles the row's kernel.
template <typename Element, int kHeadDim, bool kGeneral>
constexpr bool has_row(const RecipeRow& row) {
  return row.exists() && row.operands == Operands::k16Bits && row.head_dim == kHeadDim &&
         (row.modifiers != kNoModifier) == kGeneral &&
         (std::is_same_v<Element, __nv_bfloat16> || !row.bfloat16_only);
}

template <typename Element, int kHeadDim, int kRow>
Status launch_row(const Forward& params, const SegmentSpans& spans, cudaStream_t stream) {
  if constexpr (kRecipes[kRow].recipe == Recipe::kDecode) {
    static_assert(kRecipes[kRow].keys == DecodeConfigOf<kHeadDim>::kBlockKv);
    return launch_decode<Element, kHeadDim>(params, stream);
  } else if constexpr (kRecipes[kRow].recipe == Recipe::kColumns) {
    return launch_forward_columns<Element>(params, stream);
  } else if constexpr (kRecipes[kRow].recipe == Recipe::kShort ||
                       kRecipes[kRow].recipe == Recipe::kShortKeyMask ||
                       kRecipes[kRow].recipe == Recipe::kShortEvery) {
    return launch_forward_short<Element, kRecipes[kRow].modifiers>(params, stream);
  } else if constexpr (kRecipes[kRow].recipe == Recipe::kKeyMask ||
                       kRecipes[kRow].recipe == Recipe::kKeyMaskTriple) {
    return launch_forward_config<KeyMaskConfig<RowConfig<kRow>>, Element, kNoModifier>(
        params, spans, stream);
  } else {
    return launch_forward_config<RowConfig<kRow>, Element, kRecipes[kRow].modifiers>(params, spans,
                                                                                     stream);
  }
}

// kHeadDim bounds head_dim and value_dim.
template <typename Element, int kHeadDim, bool kGeneral>
Status launch_forward(const Forward& call, const Choice& choice, cudaStream_t stream) {
  Forward params = call;
  SegmentSpans spans;
  const bool looks_at_spans = kRecipes[choice.row].recipe != Recipe::kShortEvery;
  if (choice.mask_as_segments || (looks_at_spans && params.query_segment_ids)) {
    spans = SegmentSpans::at(params.shape, params.workspace);
    const Status status = launch_segment_spans(params, spans, stream);
    if (!status.ok()) return status;
    if (choice.mask_as_segments) params = spans.as_segments(params);
  }
  Status status = Status::internal("jax_flash: a kernel was chosen that this instance lacks");
  const auto launch = [&](auto row) {
    if constexpr (has_row<Element, kHeadDim, kGeneral>(kRecipes[row.value])) {
      if (row.value == choice.row) {
        status = launch_row<Element, kHeadDim, row.value>(params, spans, stream);
      }
    }
  };
  [&]<int... kRows>(std::integer_sequence<int, kRows...>) {
    (launch(std::integral_constant<int, kRows>{}), ...);
  }(std::make_integer_sequence<int, kRecipeCount>{});
  return status;
}

}  // namespace jax_flash::sm90
