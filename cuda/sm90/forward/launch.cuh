// Launches the forward pass of the sm_90 family: which configuration of the kernel takes a call.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "modifiers/segments.cuh"
#include "params.h"
#include "sm90/decode/kernel.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/half_values.cuh"
#include "sm90/forward/kernel.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
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
  Status status = make_tensor_map("query", shape, params.query, shape.q_len, shape.heads,
                                  shape.head_dim, Config::QueryTile::kRows, maps.query);
  if (status.ok()) {
    status = make_tensor_map("key", shape, params.key, shape.kv_len, shape.kv_heads, shape.head_dim,
                             Config::kBlockKv, maps.key);
  }
  if (status.ok()) {
    status = make_tensor_map("value", shape, params.value, shape.kv_len, shape.kv_heads,
                             shape.value_dim, Config::kBlockKv, maps.value);
  }
  if (!status.ok()) return status;
  int sms = 0;
  if (status = multiprocessors(sms); !status.ok()) return status;
  QueryTileSchedule schedule(shape, static_cast<int32_t>(q_tiles),
                             JAX_FLASH_SM90_PAIRED && params.options.is_causal && tiles > sms);
  // Blocks are persistent: starting one takes as long as some tiles of keys. Of very long units,
  // where that is nothing, a block takes one: the hardware then shares them out as multiprocessors
  // become free, also where other kernels hold some of these for a while, as collectives do.
  const bool is_long = int64_t{shape.kv_len} * Config::kHeadDim >= JAX_FLASH_SM90_LONG_UNIT;
  // With segments they take units in turn.
  constexpr bool kInTurn = (kModifiers & kSegments) != 0;
  // A block that is started loses the chain of query tiles, if there is one.
  constexpr double kMostRest = kInTurn || !JAX_FLASH_SM90_REST_APART ? 0.0
                               : Config::kScoresAhead                ? 0.8
                                                                     : 0.67;
  QueryTileTail tail;
  if (kInTurn && spans.query) tail = QueryTileTail(schedule, sms);
  schedule.divide(sms, is_long && !spans.query, kMostRest);
  using Modified = ModifiedTile<Config, Element, kModifiers>;
  constexpr bool kSaturates = Modified::kSaturates;
  ForwardPlan plan(params, schedule, tail, kModifiers != kNoModifier && has_natural_logits(params),
                   kSaturates);
  // With the scale in Q, which bias_in_scores() has made sure is a power of two.
  if (Modified::kInScores && plan.modifiers.vectors) {
    plan.modifiers.query_factor = params.options.scale;
  }
  if constexpr (Config::kBiasBoxes) {
    if (plan.modifiers.vectors) status = make_bias_map<Config>(params, maps);
    if (!status.ok()) return status;
  }
  Forward adapted = params;
  adapted.options.scale /= plan.modifiers.query_factor;  // 1 where Q is not multiplied
  SkipsOf<Config> skips;
  bool follows = spans.query != nullptr || Config::kMaskWords;  // other kernels of the call
  if constexpr (Config::kMaskWords) {
    static_assert(Config::kBlockKv == MaskWords::block_kv(Config::kHeadDim));
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
  // It begins while spans are still being found, or the mask's words, or V is being converted.
  return launch_grid(follows, "sm90::forward_kernel", shape,
                     forward_kernel<Config, Element, kModifiers>, schedule.grid(), Config::kThreads,
                     Config::kSmemBytes, stream, plan, maps, adapted, skips, half_values);
}

// Two consumers have the registers for modifiers, at head dim 64 with fewer keys three.
template <int kHeadDim, uint32_t kModifiers, BiasPlace kPlace = BiasPlace::kNone>
struct ModifiedConfig {
  static constexpr bool kChained = kModifiers == kBias || kModifiers == kSoftCap;
  static constexpr int kConsumers = kHeadDim == 64 && kChained ? 3 : 2;
  static constexpr int keys() {  // multiples of kSegmentBlock with segments
    if (kHeadDim == 64) return kChained ? 96 : 128;
    if (kHeadDim == 128) return kPlace == BiasPlace::kFloats ? 96 : 128;
    if (kHeadDim == 256) return kModifiers == kSoftCap ? 80 : 64;
    return kHeadDim == 192 ? 96 : 128;
  }
  using Type = ForwardConfig<kHeadDim, kHeadDim, kConsumers, keys(), 1, ScoresAhead::kNo, kPlace,
                             kHeadDim == 128 && kPlace == BiasPlace::kBoxes ? 1 : 0>;
};

// A mask as words. At head dim 64 as without modifiers: three consumers for long calls.
template <int kHeadDim, int kConsumers>
using MaskWordsConfig = ForwardConfig<kHeadDim, kHeadDim, kConsumers, MaskWords::block_kv(kHeadDim),
                                      1, ScoresAhead::kNo, BiasPlace::kNone, 0, true>;

// With a mask alone. Its bytes become words first if they do not lie in vectors, or if enough
// batches and heads share them. With two stages of K there is no kernel for bytes.
template <typename Element, int kHeadDim>
Status launch_masked(const Forward& params, const SegmentSpans& spans, cudaStream_t stream) {
  const auto launch = [&](auto config) {
    return launch_forward_config<decltype(config), Element, kMask>(params, spans, stream);
  };
  if constexpr (kHeadDim <= 128) {
    const bool shared = MaskMatrices(params.shape, params.mask).shared(params.shape);
    if (!shared && mask_has_vectors(params, 8)) {
      return launch(typename ModifiedConfig<kHeadDim, kMask>::Type{});
    }
  }
  if constexpr (kHeadDim == 64) {
    int sms = 0;
    if (const Status status = multiprocessors(sms); !status.ok()) return status;
    if (!banded(params.options) && tiles(params.shape, 192) >= sms && params.shape.kv_len > 1024) {
      return launch(MaskWordsConfig<64, 3>{});
    }
  }
  return launch(MaskWordsConfig<kHeadDim, 2>{});
}

// Whether the scores of a bfloat16 call can begin with the bias, so that nothing is to be added to
// them later: where Q times the scale is exact.
inline bool bias_in_scores(const Forward& params) {
  int exponent = 0;
  return JAX_FLASH_SM90_QUERY_STAGES > 1 && JAX_FLASH_SM90_OPTIMISTIC &&
         JAX_FLASH_SM90_STAGES >= 3 && params.bias.dtype == DType::kBFloat16 &&
         std::frexp(params.options.scale, &exponent) == 0.5f && exponent > -14 && exponent <= 1;
}

// With modifiers. Kernels for one of them alone, at the usual head dims, are much faster than the
// one for all: its loop has ten times the instructions that a call executes.
template <typename Element, int kHeadDim>
Status launch_modified(const Forward& params, const SegmentSpans& spans, cudaStream_t stream) {
  const auto launch = [&](auto made_for) {
    constexpr uint32_t kModifiers = decltype(made_for)::value;
    using Config = typename ModifiedConfig<kHeadDim, kModifiers>::Type;
    return launch_forward_config<Config, Element, kModifiers>(params, spans, stream);
  };
  if constexpr (kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256) {
    switch (modifiers_of(params)) {
      case kBias: {
        // Where there is work for three consumers: short calls are 3% slower by it.
        if constexpr (kHeadDim == 64 && std::is_same_v<Element, __nv_bfloat16>) {
          int sms = 0;
          if (const Status status = multiprocessors(sms); !status.ok()) return status;
          if (bias_in_scores(params) && tiles(params.shape, 192) >= sms) {
            using Config = ForwardConfig<64, 64, 3, 112, 1, ScoresAhead::kNo, BiasPlace::kInScores>;
            return launch_forward_config<Config, Element, kBias>(params, spans, stream);
          }
        }
        const auto launch_biased = [&](auto config) {
          return launch_forward_config<typename decltype(config)::Type, Element, kBias>(
              params, spans, stream);
        };
        return params.bias.dtype == DType::kFloat32
                   ? launch_biased(ModifiedConfig<kHeadDim, kBias, BiasPlace::kFloats>{})
                   : launch_biased(ModifiedConfig<kHeadDim, kBias, BiasPlace::kBoxes>{});
      }
      case kSoftCap:
        // More keys, where tiles that an edge cuts, with many spills, are few.
        if constexpr (kHeadDim == 64 && std::is_same_v<Element, __nv_bfloat16>) {
          const Options& options = params.options;
          if (!banded(options) || (options.window_left < 0 && options.window_right < 0 &&
                                   params.shape.kv_len >= 8192)) {
            return launch_forward_config<ForwardConfig<64, 64, 3, 128>, Element, kSoftCap>(
                params, spans, stream);
          }
        }
        return launch(std::integral_constant<uint32_t, kSoftCap>{});
      case kMask: return launch_masked<Element, kHeadDim>(params, spans, stream);
      case kSegments: return launch(std::integral_constant<uint32_t, kSegments>{});
      default: break;
    }
  }
  return launch(std::integral_constant<uint32_t, kEveryModifier>{});
}

// kHeadDim bounds head_dim and value_dim; a head dim of 192 comes mostly with a value dim of 128.
template <typename Element, int kHeadDim, bool kGeneral>
Status launch_forward(const Forward& params, cudaStream_t stream) {
  if constexpr (!kGeneral) {
    if (takes_decode(params.shape)) return launch_decode<Element, kHeadDim>(params, stream);
  }
  SegmentSpans spans;
  if (params.query_segment_ids) {
    spans = SegmentSpans::at(params.shape, params.workspace);
    const Status status = launch_segment_spans(params, spans, stream);
    if (!status.ok()) return status;
  }
  const auto launch = [&](auto config) {
    return launch_forward_config<decltype(config), Element, kNoModifier>(params, spans, stream);
  };
  if constexpr (kGeneral) {
    return launch_modified<Element, kHeadDim>(params, spans, stream);
  } else if constexpr (kHeadDim == 64) {
    int sms = 0;
    if (const Status status = multiprocessors(sms); !status.ok()) return status;
    // In pairs (QueryTileSchedule) if the tiles differ in length.
    const bool halves_keys = JAX_FLASH_SM90_SPLIT_KEYS &&
                             tiles(params.shape, 64) <= (params.options.is_causal ? 2 : 1) * sms;
#if JAX_FLASH_SM90_SCORES_AHEAD && JAX_FLASH_SM90_OPTIMISTIC && JAX_FLASH_SM90_STAGES >= 4 && \
    JAX_FLASH_SM90_QUERY_STAGES > 1
    if (params.options.window_left < 0) {
      // Of a tile of 64 queries with two warpgroups, an edge cuts one tile of keys each.
      if (halves_keys) return launch(ForwardConfig<64, 64, 2, 128, 2, ScoresAhead::kOneCut>{});
      if (banded(params.options)) {
        return launch(ForwardConfig<64, 64, 2, 128, 1, ScoresAhead::kTwoCut>{});
      }
      if (tiles(params.shape, 192) < sms) {
        return launch(ForwardConfig<64, 64, 2, 128, 1, ScoresAhead::kOneCut>{});
      }
    }
#endif
    if (halves_keys) {
      return launch(ForwardConfig<64, 64, 2, JAX_FLASH_SM90_BLOCK_KV_64_BANDED, 2>{});
    }
    if (tiles(params.shape, 192) < sms || banded(params.options)) {
      return launch(ForwardConfig<64, 64, JAX_FLASH_SM90_CONSUMERS_64_BANDED,
                                  JAX_FLASH_SM90_BLOCK_KV_64_BANDED>{});
    }
    return launch(ForwardConfig<64, 64, JAX_FLASH_SM90_CONSUMERS_64, JAX_FLASH_SM90_BLOCK_KV_64>{});
  } else if constexpr (kHeadDim == 96) {
    return launch(ForwardConfig<96, 96, JAX_FLASH_SM90_CONSUMERS_96, JAX_FLASH_SM90_BLOCK_KV_96>{});
  } else if constexpr (kHeadDim == 128) {
    return launch(
        ForwardConfig<128, 128, JAX_FLASH_SM90_CONSUMERS_128, JAX_FLASH_SM90_BLOCK_KV_128>{});
  } else if constexpr (kHeadDim == 192) {
    if (params.shape.value_dim <= 128) return launch(ForwardConfig<192, 128, 2, 128>{});
    return launch(
        ForwardConfig<192, 192, JAX_FLASH_SM90_CONSUMERS_192, JAX_FLASH_SM90_BLOCK_KV_192>{});
  } else {
    return launch(
        ForwardConfig<256, 256, JAX_FLASH_SM90_CONSUMERS_256, JAX_FLASH_SM90_BLOCK_KV_256>{});
  }
}

}  // namespace jax_flash::sm90
