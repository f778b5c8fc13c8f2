// Computes the probabilities and the gradient of the logits of one tile again, for the backward
// pass and for the gradient of a broadcast bias.
#pragma once

#include "host/dropout.h"
#include "host/logits.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Identifies the rows of q and dout in scratch memory. The address of delta identifies the head and
// batch: each has its own, while several may share a query, and dout may have no elements.
struct LiveRows {
  const float* delta = nullptr;  // the address of the head's delta; null: scratch holds no rows
  int64_t q_begin = 0;
  int row_begin = 0, row_end = 0;
  uint64_t bits[(kBlockQ + 63) / 64] = {};

  bool operator==(const LiveRows&) const = default;
};

// Scratch memory of a task, all float32. Rows of q and dout are padded.
struct GradientScratch {
  Matrix q;       // [kBlockQ, H]: scale * query
  Matrix dout;    // [kBlockQ, h]
  Matrix s;       // [kBlockQ, kBlockKv]: logits, then probabilities after dropout
  Matrix ds;      // [kBlockQ, kBlockKv]: dout value^T, then the gradient of s
  LiveRows rows;  // the rows that q and dout hold
};

// Holds a block of keys and values, transposed.
struct KeyBlock {
  int64_t begin;
  Matrix key_t;    // [H, kBlockKv]
  Matrix value_t;  // [h, kBlockKv]
  bool packed;     // true if key_t and value_t hold the block
};

inline int64_t gradient_floats(int64_t head_dim, int64_t value_dim) {
  return (head_dim + value_dim) * kBlockQ + 2 * kBlockQ * kBlockKv;
}
inline int64_t key_block_floats(int64_t head_dim, int64_t value_dim) {
  return (head_dim + value_dim) * kBlockKv;
}

inline GradientScratch gradient_scratch(Arena& arena, int64_t head_dim, int64_t value_dim) {
  GradientScratch scratch;
  scratch.q = {arena.take(kBlockQ * head_dim), head_dim};
  scratch.dout = {arena.take(kBlockQ * value_dim), value_dim};
  scratch.s = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  scratch.ds = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  return scratch;
}

inline KeyBlock key_block(Arena& arena, int64_t head_dim, int64_t value_dim) {
  KeyBlock keys = {};
  keys.key_t = {arena.take(head_dim * kBlockKv), kBlockKv};
  keys.value_t = {arena.take(value_dim * kBlockKv), kBlockKv};
  return keys;
}

// Holds a head with results of the forward pass and the gradient of its output.
struct GradientHead : Head {
  Rows dout;
  const float* lse;      // [T], of stride lse_row
  const float* lse_low;  // [T], of stride lse_row; nullptr: 0
  int64_t lse_row;
  const float* delta;  // [T]

  // Returns whether row r has probabilities. Other rows have no gradient; their operands may hold
  // any values.
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

inline void pack_key_value_t(const Head& head, KeyBlock& keys) {
  if (keys.packed) return;
  const int cols = static_cast<int>(min_of<int64_t>(head.kv_len - keys.begin, kBlockKv));
  pack_columns(head.key, keys.begin, cols, keys.key_t);
  pack_columns(head.value, keys.begin, cols, keys.value_t);
  keys.packed = true;
}

inline LiveRows live_rows(const GradientHead& head, const Tile& tile) {
  LiveRows rows = {head.delta, tile.q_begin, tile.row_begin, tile.row_end, {}};
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    rows.bits[r / 64] |= uint64_t{head.alive(tile, r)} << (r % 64);
  }
  return rows;
}

// Packs the tile's rows of scratch.q and dout, unless the previous tile had the same rows.
inline void pack_queries(const GradientHead& head, const Tile& tile, GradientScratch& scratch) {
  const LiveRows rows = live_rows(head, tile);
  if (rows == scratch.rows) return;
  scratch.rows = rows;
  const int r0 = tile.row_begin;
  const auto alive = [&](int i) { return rows.bits[(r0 + i) / 64] >> ((r0 + i) % 64) & 1; };
  pack_rows(head.query, tile.q_begin + r0, tile.rows(), head.options->scale,
            from_row(scratch.q, r0), alive);
  pack_rows(head.dout, tile.q_begin + r0, tile.rows(), 1.0f, from_row(scratch.dout, r0), alive);
}

// Replaces logits and dp of row r by p and ds = p (dp - delta), times the derivative of the soft
// cap. For elements that r may not attend to, both are 0 by a select: dp or lse may be NaN.
inline void gradient_row(const GradientHead& head, const Tile& tile, int r, uint64_t keep, float* s,
                         float* dp) {
  const Options& options = *head.options;
  const int64_t i = tile.q_begin + r;
  const float lse = head.lse[i * head.lse_row], delta = head.delta[i];
  const float lse_low = head.lse_low ? head.lse_low[i * head.lse_row] : 0.0f;
  const bool whole = tile.whole(r), drops = options.dropout_threshold != 0;
  const bool capped = options.logits_soft_cap != 0.0f;
  const float inverse_cap = capped ? 1.0f / options.logits_soft_cap : 0.0f;
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
      // The slope for a logit of -inf is 0, as for -cap. Otherwise its gradient would be 0 times
      // infinity.
      const Vec ratio = max_ignoring_nan(splat(-options.logits_soft_cap), logits) * inverse_cap;
      ds *= 1.0f - ratio * ratio;
    }
    if (!whole) {
      const VecI attended = lanes_set(tile.bits[r], v);
      ds = attended ? ds : Vec{};
      dropped = attended ? dropped : Vec{};
    }
    store(s + v * kLanes, dropped);
    store(dp + v * kLanes, ds);
  }
}

// Computes rows [row_begin, row_end) of scratch.q, dout, s and ds, for a tile of `keys`.
inline void gradient_tile(const GradientHead& head, const Tile& tile, KeyBlock& keys,
                          GradientScratch& scratch) {
  const int r0 = tile.row_begin;
  pack_key_value_t(head, keys);
  pack_queries(head, tile, scratch);
  start_logits(head, tile, scratch.q, keys.key_t, scratch.s);
  gemm({tile.rows(), tile.cols, head.value.dim, false}, as_left(from_row(scratch.dout, r0)),
       keys.value_t, from_row(scratch.ds, r0));
  uint64_t keep[kBlockQ] = {};
  if (head.options->dropout_threshold != 0) keep_bits(head, tile, keep);
  for (int r = r0; r < tile.row_end; ++r) {
    float* s = scratch.s.data + r * scratch.s.row;
    float* ds = scratch.ds.data + r * scratch.ds.row;
    if (head.alive(tile, r)) {
      finish_logits_row(head, tile, r, s);
      gradient_row(head, tile, r, keep[r], s, ds);
      continue;
    }
    for (int v = 0; v < tile.vectors(); ++v) {
      store(s + v * kLanes, Vec{});
      store(ds + v * kLanes, Vec{});
    }
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
