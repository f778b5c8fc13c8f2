// Describes a call to Hopper's forward kernel for float32: its parameters, derived on the host.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/float32_tiles.h"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

struct Float32Plan {
  QueryTileSchedule schedule;
  bool in_turn = false;  // a block takes its next unit, by a counter, when it has loaded one
  ForwardBand band;
  int32_t q_len = 0, kv_heads = 0, group = 1, head_dim = 0, value_dim = 0;
  float to_log2 = 0.0f;  // from products, or from logits, to logits in log2 units
  bool vectors = false;  // true if four columns of Q can be read at a time
  RowsOperand query, out, lse, sinks;
  Float32Tiles workspace;

  Float32Plan() = default;
  // `modified`: logits are computed before the exponentials, with all modifiers.
  Float32Plan(const Forward& params, const QueryTileSchedule& tiles, bool takes,
              const Float32Tiles& place, bool modified)
      : schedule(tiles),
        in_turn(takes),
        band(params),
        q_len(params.shape.q_len),
        kv_heads(params.shape.kv_heads),
        group(params.shape.heads / params.shape.kv_heads),
        head_dim(params.shape.head_dim),
        value_dim(params.shape.value_dim),
        to_log2(modified ? (adds_to_logits(params) ? kLog2E : 1.0f)
                         : params.options.scale * kLog2E),
        vectors(has_vectors(params.query, 4, 16) && params.shape.head_dim % 4 == 0),
        query(params.query),
        out(params.out),
        lse(params.lse),
        sinks(params.sinks),
        workspace(place) {}

  // Returns the index of a head's first key tile in the workspace.
  __device__ __forceinline__ int64_t first_tile(const QueryTileIndex& q) const {
    return (int64_t{q.batch} * kv_heads + q.kv_head) * workspace.tiles;
  }
};

}  // namespace jax_flash::sm90
