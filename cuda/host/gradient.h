// What the backward pass and the bias's gradient share: probabilities and the
// gradient of the logits, recomputed for one tile.
#pragma once

#include "host/dropout.h"
#include "host/logits.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Scratch of a task, all float32. Rows of q, dout, key, dkey and dvalue as padded.
struct GradientScratch {
  Matrix q;        // [kBlockQ, H]: scale * query
  Matrix dout;     // [kBlockQ, h]
  Matrix s;        // [kBlockQ, kBlockKv]: logits, then probabilities after dropout
  Matrix ds;       // [kBlockQ, kBlockKv]: dout value^T, then the gradient of s
  Matrix key_t;    // [H, kBlockKv]
  Matrix value_t;  // [h, kBlockKv]
};

inline int64_t gradient_floats(int64_t head_dim, int64_t value_dim) {
  return (head_dim + value_dim) * (kBlockQ + kBlockKv) + 2 * kBlockQ * kBlockKv;
}

inline GradientScratch gradient_scratch(Arena& arena, int64_t head_dim, int64_t value_dim) {
  GradientScratch scratch;
  scratch.q = {arena.take(kBlockQ * head_dim), head_dim};
  scratch.dout = {arena.take(kBlockQ * value_dim), value_dim};
  scratch.s = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  scratch.ds = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  scratch.key_t = {arena.take(head_dim * kBlockKv), kBlockKv};
  scratch.value_t = {arena.take(value_dim * kBlockKv), kBlockKv};
  return scratch;
}

// A head with what the forward pass left and the gradient that arrives.
struct GradientHead : Head {
  Rows dout;
  const float* lse;      // [T], of stride lse_row
  const float* lse_low;  // likewise, or nullptr: 0
  int64_t lse_row;
  const float* delta;  // [T]

  // Rows without a probability have no gradient, and may hold anything.
  bool alive(const Tile& tile, int r) const {
    return tile.bits[r] != 0 && lse[(tile.q_begin + r) * lse_row] != -kInfinity;
  }
};

inline float* delta_of(const Backward& call, int64_t batch, int64_t n) {
  return static_cast<float*>(call.workspace) + (batch * call.shape.heads + n) * call.shape.q_len;
}

inline GradientHead gradient_head_of(const Backward& call, int64_t batch, int64_t n) {
  const Shape& shape = call.shape;
  return {head_of(call, batch, n),
          rows_of(shape, call.dout, batch, n, shape.value_dim),
          floats_of(shape, call.lse, batch, n),
          call.lse_low.data ? floats_of(shape, call.lse_low, batch, n) : nullptr,
          call.lse.row,
          delta_of(call, batch, n)};
}

inline void pack_key_value_t(const Head& head, int64_t kv_begin, const GradientScratch& scratch) {
  const int cols = static_cast<int>(min_of<int64_t>(head.kv_len - kv_begin, kBlockKv));
  pack_columns(head.key, kv_begin, cols, scratch.key_t);
  pack_columns(head.value, kv_begin, cols, scratch.value_t);
}

// From logits and dp to p and ds = p (dp - delta), times the derivative of the soft cap,
// for row r. Selects rather than multiplies by 0 where r may not attend.
inline void gradient_row(const GradientHead& head, const Tile& tile, int r, float* s, float* dp) {
  const Options& options = *head.options;
  const int64_t i = tile.q_begin + r;
  const float lse = head.lse[i * head.lse_row], delta = head.delta[i];
  const float lse_low = head.lse_low ? head.lse_low[i * head.lse_row] : 0.0f;
  const bool whole = tile.whole(r), drops = options.dropout_threshold != 0;
  const bool capped = options.logits_soft_cap != 0.0f;
  const float inverse_cap = capped ? 1.0f / options.logits_soft_cap : 0.0f;
  const uint64_t keep = drops ? keep_bits(head, i, tile.kv_begin) : 0;
  for (int v = 0; v < tile.vectors(); ++v) {
    const Vec logits = load(s + v * kLanes);
    Vec p = exp((logits - lse) - lse_low);
    Vec gradient = load(dp + v * kLanes);
    Vec dropped = p;
    if (drops) {
      const VecI kept = lanes_set(keep, v);
      gradient = kept ? gradient * options.dropout_scale : Vec{};
      dropped = kept ? p * options.dropout_scale : Vec{};
    }
    Vec ds = p * (gradient - delta);
    if (capped) {
      // A logit of -inf has the slope 0 of -cap, lest 0 times infinity be its gradient.
      const Vec ratio = max_ignoring_nan(splat(-options.logits_soft_cap), logits) * inverse_cap;
      ds *= 1.0f - ratio * ratio;
    }
    if (!whole) ds = lanes_set(tile.bits[r], v) ? ds : Vec{};
    store(s + v * kLanes, dropped);
    store(dp + v * kLanes, ds);
  }
}

// Fills rows [row_begin, row_end) of scratch.q, dout, s and ds. scratch.key_t and
// value_t are those of the tile's keys.
inline void gradient_tile(const GradientHead& head, const Tile& tile,
                          const GradientScratch& scratch) {
  const int r0 = tile.row_begin, rows = tile.rows();
  const auto alive = [&](int i) { return head.alive(tile, r0 + i); };
  const Matrix q = from_row(scratch.q, r0), dout = from_row(scratch.dout, r0);
  pack_rows(head.query, tile.q_begin + r0, rows, head.options->scale, q, alive);
  pack_rows(head.dout, tile.q_begin + r0, rows, 1.0f, dout, alive);
  start_logits(head, tile, scratch.q, scratch.key_t, scratch.s);
  gemm({rows, tile.cols, head.value.dim, false}, as_left(dout), scratch.value_t,
       from_row(scratch.ds, r0));
  for (int r = r0; r < tile.row_end; ++r) {
    float* s = scratch.s.data + r * scratch.s.row;
    float* ds = scratch.ds.data + r * scratch.ds.row;
    if (head.alive(tile, r)) {
      finish_logits_row(head, tile, r, s);
      gradient_row(head, tile, r, s, ds);
      continue;
    }
    for (int v = 0; v < tile.vectors(); ++v) {
      store(s + v * kLanes, Vec{});
      store(ds + v * kLanes, Vec{});
    }
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
