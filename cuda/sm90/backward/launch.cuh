// Launches the backward pass for sm_90: chooses the kernels for a head dim, and their arguments.
//
//   head dim                                             kernels in sm90/backward/
//   up to 64, many short sequences                       short.cuh
//   up to 128; up to 192 with at most 128 value columns  narrow.cuh
//   above, up to 256                                     wide_key.cuh, then wide_query.cuh
//   above 256                                            columns.cuh
//
// The begin kernel of edges.cuh runs before all but short.cuh, and computes delta. After
// narrow.cuh, the end kernel of edges.cuh converts dQ.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "modifiers/kernels.h"
#include "params.h"
#include "plan/choice.h"
#include "plan/narrow_backward.h"
#include "sm90/backward/bias.cuh"
#include "sm90/backward/bias_gradient.cuh"
#include "sm90/backward/columns.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/dropout.cuh"
#include "sm90/backward/edges.cuh"
#include "sm90/backward/mask.cuh"
#include "sm90/backward/narrow.cuh"
#include "sm90/backward/order.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/schedule.cuh"
#include "sm90/backward/short.cuh"
#include "sm90/backward/wide_key.cuh"
#include "sm90/backward/wide_query.cuh"
#include "sm90/kernels.h"
#include "status.h"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

inline constexpr int kSpreadSmemBytes = 100 * 1024;  // two such blocks fit on a multiprocessor

template <typename Config, typename Element, bool kGeneral>
Status launch_backward_config(const Backward& params, const BackwardWorkspace& workspace,
                              cudaStream_t stream) {
  // Kernels for some modifiers, and those that compute dQ in pieces, do not take turns: they have
  // no ordered instance.
  constexpr bool kOnly = Config::kModifier != kNoModifier || Config::kInPieces;
  const Shape& shape = params.shape;
  BackwardMapsOf<Config> maps;
  Status status = make_backward_maps(params, Config::kBlockQ, Config::kBlockKv, maps);
  if constexpr (Config::kHasBias) {
    if (status.ok()) status = make_bias_map(params, maps);
  }
  KeyGradientMaps gradient_maps;
  if (status.ok()) status = make_gradient_maps(params, 64, gradient_maps);
  int sms = 0;
  if (status.ok()) status = multiprocessors(sms);
  if (!status.ok()) return status;
  const int32_t heads_of_unit = workspace.heads_of_key_block;
  KeyBlocks blocks = divide_keys<Config>(params, heads_of_unit, workspace.turns != nullptr, sms);
  const ZeroPlan zeros = plan_zeros<Config>(shape, workspace, blocks);
  constexpr bool kAdds = kGeneral || Config::kHasBias;
  GradientScales scales = gradient_scales<Element, kAdds>(params.options);
  if (Config::kHasDropout) scales = dropout_scales(params.options);
  scales.shifts_lse = Config::kHasSlopes;
  EndPlan ends = plan_ends(params, scales, blocks, heads_of_unit,
                           !kGeneral && !(workspace.turns && Config::kOrderedSums > 1));
  const SplitPlan split = plan_split<Config>(params, workspace, sms, blocks, ends,
                                             !Config::kHasSegments && !Config::kSkipsByMask);
  MaskRows mask_rows;
  TransposedMaskWords mask_words;
  if constexpr (Config::kSkipsByMask) {
    static_assert(Config::kBlockKv == MaskRows::kKeys);
    if (!Config::kHasKeyMask) {
      status = launch_transposed_mask_words(params, workspace, mask_words, stream);
    }
    if (status.ok() && blocks.order == TurnOrder::kNone) {
      status = launch_mask_rows(params, workspace, mask_rows, stream);
    }
  }
  if (status.ok()) {
    status = launch_backward_begin<Element>(params, workspace, scales, true, zeros, stream);
  }
  if (status.ok()) {
    const auto launch = [&](auto* kernel) {
      return launch_dependent(
          "sm90::backward_kernel", shape, kernel, blocks.launched, Config::kThreads,
          Config::kSmemBytes, stream, params, maps, gradient_maps, workspace, blocks.schedule,
          blocks.order,
          BlockPlan(params, heads_of_unit, zeros, ends, split, mask_rows, mask_words));
    };
    if (kOnly || blocks.order == TurnOrder::kNone) {
      status = launch(backward_kernel<Config, Element, kGeneral, false>);
    } else if constexpr (!kOnly) {
      status = launch(backward_kernel<Config, Element, kGeneral, true>);
    }
  }
  if (!status.ok()) return status;
  using Layout = typename Config::Layout;
  static_assert(kEndCols == Config::kDqueryGroupCols);
  constexpr int kGroups = Layout::kCols / kEndCols;
  const int64_t tiles = ceil_div(shape.q_len, 64), heads = shape.batch * shape.heads;
  if (ends.blocks > 0) {
    return launch_dependent("sm90::backward_rest_kernel", shape,
                            backward_rest_kernel<Layout, Element>,
                            int64_t{ends.blocks} * kRestBlocks * kGroups, kEndThreads, 0, stream,
                            BackwardEdgePlan(params, workspace, scales, tiles), ends);
  }
  // If there are few blocks, this much shared memory prevents many of them from running on the
  // multiprocessors that are free first.
  const int end_smem_bytes = tiles * heads <= 2 * sms ? kSpreadSmemBytes : 0;
  return launch_dependent("sm90::backward_end_kernel", shape, backward_end_kernel<Layout, Element>,
                          tiles * heads * kGroups, kEndThreads, end_smem_bytes, stream,
                          BackwardEdgePlan(params, workspace, scales, tiles));
}

template <typename Element, int kHeadDim, bool kGeneral>
Status launch_wide_backward(const Backward& params, const BackwardWorkspace& workspace,
                            cudaStream_t stream) {
  using KeyConfig = WideKeyConfig<kHeadDim>;
  using QueryConfig = WideQueryConfig<kHeadDim>;
  const Shape& shape = params.shape;
  const int64_t heads = shape.batch * shape.heads, kv_heads = shape.batch * shape.kv_heads;
  const int64_t kv_tiles_total = ceil_div(shape.kv_len, KeyConfig::kBlockKv);
  const int64_t q_tiles_total = ceil_div(shape.q_len, QueryConfig::kBlockQ);
  BackwardMaps key_maps, query_maps;
  Status status = make_backward_maps(params, KeyConfig::kBlockQ, KeyConfig::kBlockKv, key_maps);
  if (status.ok()) {
    status = make_backward_maps(params, QueryConfig::kBlockQ, QueryConfig::kBlockKv, query_maps);
  }
  if (status.ok()) {
    status = launch_backward_begin<Element>(params, workspace, {}, false, {}, stream);
  }
  int sms = 0;
  if (status.ok()) status = multiprocessors(sms);
  if (status.ok()) {
    const int64_t query_bytes = int64_t{shape.q_len} * 4 * kHeadDim;
    const TileSchedule schedule =
        make_schedule(params, true, KeyConfig::kBlockKv, kv_heads,
                      query_bytes * shape.heads / std::max(shape.kv_heads, 1), sms);
    status = launch_dependent("sm90::backward_wide_key_kernel", shape,
                              backward_wide_key_kernel<KeyConfig, Element, kGeneral>,
                              kv_tiles_total * kv_heads, KeyConfig::kThreads, KeyConfig::kSmemBytes,
                              stream, params, key_maps, workspace, schedule,
                              BlockPlan(params, shape.heads / std::max(shape.kv_heads, 1)));
  }
  if (!status.ok()) return status;
  const TileSchedule schedule = make_schedule(params, false, QueryConfig::kBlockQ, heads,
                                              int64_t{shape.kv_len} * 4 * kHeadDim, sms);
  return launch_dependent("sm90::backward_wide_query_kernel", shape,
                          backward_wide_query_kernel<QueryConfig, Element, kGeneral>,
                          q_tiles_total * heads, QueryConfig::kThreads, QueryConfig::kSmemBytes,
                          stream, params, query_maps, workspace, schedule);
}

// Zeroes the slopes' gradient: thread blocks of the kernels for ALiBi slopes add to it by atomics.
inline Status zero_slopes_gradient(const Backward& params, cudaStream_t stream) {
  if (!params.dalibi_slopes) return {};
  const int64_t bytes = params.shape.batch * params.shape.heads * sizeof(float);
  const cudaError_t error = cudaMemsetAsync(params.dalibi_slopes.data, 0, bytes, stream);
  if (error == cudaSuccess) return {};
  return Status::internal(std::string("jax_flash: cannot zero the slopes' gradient: ") +
                          cudaGetErrorString(error));
}

// Computes the gradients of a bias, ALiBi slopes and a relative bias.
template <typename Element, int kHeadDim>
Status launch_gradients_of_addends(const Backward& params, const BackwardWorkspace& workspace,
                                   cudaStream_t stream) {
  Backward rest = params;
  if constexpr (kHeadDim <= 128) {
    bool launched = false;
    const Status status =
        launch_wide_bias_gradient<Element, kHeadDim>(params, workspace, stream, launched);
    if (!status.ok()) return status;
    if (launched) rest.dbias = {};
  }
  return launch_added_gradients<Element>(rest, workspace, stream);
}

// Launches a kernel of plan/narrow_backward.h, given by its index, and the kernels beside it.
template <typename Element, int kHeadDim>
Status launch_narrow(const Backward& params, int32_t index, const BackwardWorkspace& workspace,
                     cudaStream_t stream) {
  Status status = Status::internal("jax_flash: a kernel was chosen that this instance lacks");
  const auto launch = [&](auto row) {
    constexpr NarrowBackward kKernel = kNarrowBackward[row.value];
    if constexpr (kKernel.exists(kHeadDim, std::is_same_v<Element, __nv_bfloat16>)) {
      if (row.value != index) return;
      using Config =
          BackwardConfig<kHeadDim, false, kKernel.modifiers, kKernel.bias_bytes, kKernel.key_mask>;
      status = {};
      if (Config::kHasSlopes) status = zero_slopes_gradient(params, stream);
      if (status.ok()) {
        status = launch_backward_config<Config, Element, false>(params, workspace, stream);
      }
      if (Config::kHasBias && status.ok()) {
        status = launch_gradients_of_addends<Element, kHeadDim>(params, workspace, stream);
      }
    }
  };
  [&]<int... kRows>(std::integer_sequence<int, kRows...>) {
    (launch(std::integral_constant<int, kRows>{}), ...);
  }(std::make_integer_sequence<int, kNarrowBackwardCount>{});
  return status;
}

// Launches the kernels of short.cuh, and those for gradients that it leaves.
template <typename Element, bool kGeneral>
Status launch_in_a_block(const Backward& params, cudaStream_t stream) {
  if constexpr (!kGeneral) {
    return launch_backward_short<Element, kNoModifier>(params, {}, false, stream);
  } else {
    if (has_key_mask_alone(params)) {
      return launch_backward_short<Element, kMask>(params, {}, false, stream);
    }
    BackwardWorkspace workspace;
    BackwardWorkspace::plan(params.shape, 64, BackwardFeatures::of(params), params.workspace,
                            workspace);
    Backward rest = params;
    if (sums_short_bias(params)) rest.dbias = {};
    const bool is_rest = rest.dbias || distance_floats(params) > 0;
    Status status;
    if (is_rest && params.query_segment_ids) {
      status = launch_segment_spans(params, workspace.spans, stream);
    }
    if (status.ok()) {
      status = launch_backward_short<Element, kEveryModifier>(params, workspace, is_rest, stream);
    }
    if (!status.ok() || !is_rest) return status;
    return launch_gradients_of_addends<Element, 64>(rest, workspace, stream);
  }
}

// kHeadDim bounds head_dim and value_dim.
template <typename Element, int kHeadDim, bool kGeneral>
Status launch_backward(const Backward& call, const Choice& choice, cudaStream_t stream) {
  if constexpr (kHeadDim == 64) {
    if (choice.in_a_block) return launch_in_a_block<Element, kGeneral>(call, stream);
  }
  BackwardWorkspace workspace;
  BackwardWorkspace::plan(call.shape, (kHeadDim + 63) / 64 * 64, BackwardFeatures::of(call),
                          call.workspace, workspace);
  if (choice.mask_as_segments) workspace.spans = SegmentSpans::at(call.shape, call.workspace);
  Status status;
  if (choice.mask_as_segments || call.query_segment_ids) {
    status = launch_segment_spans(call, workspace.spans, stream);
  }
  if (!status.ok()) return status;
  const Backward params = choice.mask_as_segments ? workspace.spans.as_segments(call) : call;
  if constexpr (kGeneral && kHeadDim <= 128) {
    if (choice.narrow >= 0) {
      return launch_narrow<Element, kHeadDim>(params, choice.narrow, workspace, stream);
    }
  }
  if constexpr (kHeadDim == kOneKernelHeadDim && !kGeneral) {
    if (choice.one_kernel) {
      return launch_backward_config<BackwardConfig<kHeadDim, false>, Element, false>(
          params, workspace, stream);
    }
  }
  if constexpr (kHeadDim > kMaxUndividedHeadDim) {
    status = launch_backward_columns<Element>(params, workspace, stream);
  } else if constexpr (kHeadDim > 128) {
    status = launch_wide_backward<Element, kHeadDim, kGeneral>(params, workspace, stream);
  } else {
    status = launch_backward_config<BackwardConfig<kHeadDim, kGeneral>, Element, kGeneral>(
        params, workspace, stream);
  }
  if constexpr (kGeneral) {
    if (status.ok())
      status = launch_gradients_of_addends<Element, kHeadDim>(params, workspace, stream);
  }
  return status;
}

}  // namespace jax_flash::sm90
