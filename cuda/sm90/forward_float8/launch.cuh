// Launches the forward pass of float8 operands.
#pragma once

#include <cstdint>

#include "modifiers/kernels.h"
#include "params.h"
#include "plan/choice.h"
#include "plan/float8.h"
#include "sm80/decode/kernel.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward_float8/config.cuh"
#include "sm90/forward_float8/kernel.cuh"
#include "sm90/forward_float8/plan.cuh"
#include "sm90/forward_float8/values.cuh"
#include "status.h"
#include "tile/element.cuh"
#include "tile/launch.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

template <typename Config>
Status launch_float8_config(const Forward& call, const Scales& scales, bool mask_as_segments,
                            cudaStream_t stream) {
  Forward params = call;
  const Shape& shape = params.shape;
  const int64_t q_tiles = ceil_div(shape.q_len, Config::kBlockQ);
  const int64_t tiles = q_tiles * shape.heads * shape.batch;
  if (tiles == 0) return {};
  const bool has_segments = mask_as_segments || params.query_segment_ids;
  SegmentSpans spans;
  Status status;
  if (has_segments) {
    spans = SegmentSpans::at(shape, params.workspace);
    status = launch_segment_spans(params, spans, stream);
    if (mask_as_segments) params = spans.as_segments(params);
  }
  const auto workspace = Float8Workspace::at(shape, has_segments, params.workspace);
  if (status.ok()) {
    status = launch_float8_values<Config::kValueDim>(params, scales, workspace, spans, stream);
  }
  Float8Maps maps;
  if (status.ok()) {
    status = make_tensor_map("query", shape, params.query, shape.q_len, shape.heads, shape.head_dim,
                             Config::QueryTile::kRows, maps.query);
  }
  if (status.ok()) {
    status = make_tensor_map("key", shape, params.key, shape.kv_len, shape.kv_heads, shape.head_dim,
                             Config::kBlockKv, maps.key);
  }
  int sms = 0;
  if (status.ok()) status = multiprocessors(sms);
  if (!status.ok()) return status;
  QueryTileSchedule schedule(shape, static_cast<int32_t>(q_tiles),
                             params.options.is_causal && tiles > sms);
  // As in sm90/forward/launch.cuh.
  const bool is_long = int64_t{shape.kv_len} * Config::kHeadDim >= 2 * JAX_FLASH_SM90_LONG_UNIT;
  const bool in_turn = schedule.divide(sms, is_long);
  const Float8Plan plan(params, scales, schedule, in_turn, workspace, spans);
  // The kernel begins while values are still being transposed (griddepcontrol).
  return launch_grid(true, "sm90::forward_float8_kernel", shape, forward_float8_kernel<Config>,
                     schedule.grid(), Config::kThreads, Config::kSmemBytes, stream, plan, maps);
}

template <int kHeadDim, bool kGeneral>
Status launch_forward_float8(const Forward& params, const Scales& scales, const Choice& choice,
                             cudaStream_t stream) {
  if constexpr (kGeneral) {
    if (choice.decodes) {
      return sm80::launch_decode<Float8, kHeadDim>(sm80::Float8Forward{params, scales}, stream);
    }
  }
  if constexpr (kHeadDim == 192) {
    if (params.shape.value_dim == 128) {
      return launch_float8_config<Float8Config<192, 128, kGeneral>>(
          params, scales, choice.mask_as_segments, stream);
    }
  }
  return launch_float8_config<Float8Config<kHeadDim, kHeadDim, kGeneral>>(
      params, scales, choice.mask_as_segments, stream);
}

}  // namespace jax_flash::sm90
