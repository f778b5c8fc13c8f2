// Describes a call to the FP8 forward kernel: its parameters, derived on the host.
#pragma once

#include <cstdint>

#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/float8.h"
#include "plan/segment_spans.h"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

struct Float8Maps {
  CUtensorMap query, key;
};

struct Float8Plan {
  QueryTileSchedule schedule;
  bool in_turn = false;  // a block takes its next unit, by a counter, when it has loaded one
  BoxAxes query, key;
  ForwardBand band;
  int32_t q_len = 0, kv_heads = 0, value_dim = 0;
  float to_log2 = 0.0f, cap_log2 = 0.0f;  // cap_log2: 0 if there is no soft cap
  DType out_dtype = DType::kBFloat16;
  RowsOperand out, lse, sinks, query_scale;
  Float8Workspace workspace;
  SegmentSpans segments;

  Float8Plan() = default;
  Float8Plan(const Forward& params, const Scales& scales, const QueryTileSchedule& tiles,
             bool takes, const Float8Workspace& place, const SegmentSpans& spans)
      : schedule(tiles),
        in_turn(takes),
        query(params.query),
        key(params.key),
        band(params),
        q_len(params.shape.q_len),
        kv_heads(params.shape.kv_heads),
        value_dim(params.shape.value_dim),
        to_log2(params.options.scale * kLog2E),
        cap_log2(params.options.logits_soft_cap * kLog2E),
        out_dtype(params.out.dtype),
        out(params.out),
        lse(params.lse),
        sinks(params.sinks),
        query_scale(scales.query),
        workspace(place),
        segments(spans) {}

  // Returns the index of a head's first key tile in the workspace.
  __device__ __forceinline__ int64_t first_tile(const QueryTileIndex& q) const {
    return (int64_t{q.batch} * kv_heads + q.kv_head) * workspace.tiles;
  }
};

}  // namespace jax_flash::sm90
