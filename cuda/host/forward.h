// The forward pass: a task is one block of queries of one (batch, head).
#pragma once

#include "host/dropout.h"
#include "host/logits.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Scratch of a task, all float32. Rows of q and o as padded.
struct ForwardScratch {
  Matrix q;      // [kBlockQ, H]: scale * query
  Matrix o;      // [kBlockQ, h]: sum of exp(logits - max) value
  Matrix s;      // [kBlockQ, kBlockKv]: logits, then probabilities
  Matrix key_t;  // [H, kBlockKv]
  Matrix value;  // [kBlockKv, h]
  Matrix sum;    // [kBlockQ, kLanes]: of exp(logits - max), by lane
  float* max;    // [kBlockQ]
};

inline int64_t forward_floats(int64_t head_dim, int64_t value_dim) {
  return head_dim * (kBlockQ + kBlockKv) + value_dim * (kBlockQ + kBlockKv) + kBlockQ * kBlockKv +
         kBlockQ * kRowPadding + kBlockQ;
}

inline ForwardScratch forward_scratch(Arena& arena, int64_t head_dim, int64_t value_dim) {
  ForwardScratch scratch;
  scratch.q = {arena.take(kBlockQ * head_dim), head_dim};
  scratch.o = {arena.take(kBlockQ * value_dim), value_dim};
  scratch.s = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  scratch.key_t = {arena.take(head_dim * kBlockKv), kBlockKv};
  scratch.value = {arena.take(kBlockKv * value_dim), value_dim};
  scratch.sum = {arena.take(kBlockQ * kRowPadding), kLanes};
  scratch.max = arena.take(kBlockQ);
  return scratch;
}

// One step of the online softmax for row r: logits become exp(logits - max), the sums
// so far are rescaled if the maximum grew. A NaN is never the maximum, but reaches
// the sum and, by the product with value, the output.
inline void softmax_row(const ForwardScratch& scratch, int r, int vectors) {
  float* s = scratch.s.data + r * scratch.s.row;
  float* sum = scratch.sum.data + r * scratch.sum.row;
  Vec top = splat(scratch.max[r]);
  for (int v = 0; v < vectors; ++v) top = max_ignoring_nan(top, load(s + v * kLanes));
  const float new_max = reduce_max(top);
  const float base = new_max == -kInfinity ? 0.0f : new_max;  // -inf - -inf is NaN
  Vec total = load(sum);
  if (new_max > scratch.max[r]) {
    const Vec rescale = exp(splat(scratch.max[r] - base));
    total *= rescale;
    float* o = scratch.o.data + r * scratch.o.row;
    for (int64_t c = 0; c < scratch.o.row; c += kLanes) store(o + c, load(o + c) * rescale);
    scratch.max[r] = new_max;
  }
  for (int v = 0; v < vectors; ++v) {
    const Vec p = exp(load(s + v * kLanes) - base);
    total += p;
    store(s + v * kLanes, p);
  }
  store(sum, total);
}

inline void drop_row(const Head& head, const Tile& tile, int r, float* p) {
  const uint64_t keep = keep_bits(head, tile.q_begin + r, tile.kv_begin);
  for (int v = 0; v < tile.vectors(); ++v) {
    const Vec scaled = load(p + v * kLanes) * head.options->dropout_scale;
    store(p + v * kLanes, lanes_set(keep, v) ? scaled : Vec{});
  }
}

// What row r of the next tile will read, requested while the processor computes this one.
inline void prefetch_next(const Head& head, const Tile& tile, int r) {
  const int64_t kv_begin = tile.kv_begin + kBlockKv, j = kv_begin + r;
  if (kv_begin < head.kv_len) prefetch_logits_row(head, tile.q_begin + r, kv_begin);
  if (r >= kBlockKv || j >= head.kv_len) return;
  prefetch_row(head.key, j);
  prefetch_row(head.value, j);
}

inline void forward_tile(const Head& head, const Tile& tile, const ForwardScratch& scratch) {
  const int r0 = tile.row_begin;
  pack_columns(head.key, tile.kv_begin, tile.cols, scratch.key_t);
  pack_rows(head.value, tile.kv_begin, tile.cols, 1.0f, scratch.value,
            [&](int c) { return tile.any >> c & 1; });

  gemm({tile.rows(), tile.cols, head.key.dim, false}, as_left(from_row(scratch.q, r0)),
       scratch.key_t, from_row(scratch.s, r0));
  for (int r = r0; r < tile.row_end; ++r) {
    float* s = scratch.s.data + r * scratch.s.row;
    prefetch_next(head, tile, r);
    finish_logits_row(head, tile, r, s);
    softmax_row(scratch, r, tile.vectors());
    if (head.options->dropout_threshold != 0) drop_row(head, tile, r, s);
  }
  gemm({tile.rows(), head.value.dim, tile.cols, true}, as_left(from_row(scratch.s, r0)),
       scratch.value, from_row(scratch.o, r0));
}

// Writes row r of the block: out, and lse = max + log(sum), with the sink, a logit
// without a value, joining the sum.
inline float finish_row(const ForwardScratch& scratch, int r, float sink, float* out) {
  const float max = max_of(scratch.max[r], sink);
  const float base = max == -kInfinity ? 0.0f : max;
  const float rescale = exp(scratch.max[r] - base);
  const float sum =
      reduce_add(load(scratch.sum.data + r * scratch.sum.row)) * rescale + exp(sink - base);
  const float* o = scratch.o.data + r * scratch.o.row;
  const Vec weight = splat(sum == 0.0f ? 0.0f : rescale / sum);
  for (int64_t c = 0; c < scratch.o.row; c += kLanes) {
    store(out + c, sum == 0.0f ? Vec{} : load(o + c) * weight);
  }
  return base + __builtin_logf(sum);
}

inline bool forward_task(const Forward& call, int64_t task) {
  const Shape& shape = call.shape;
  const int64_t blocks = q_blocks(shape);
  const int64_t batch = task / blocks / shape.heads, n = task / blocks % shape.heads;
  // Under a causal mask later blocks attend to more keys: the long tasks start first.
  const int64_t q_begin = (blocks - 1 - task % blocks) * kBlockQ;
  const Head head = head_of(call, batch, n);
  const QueryBlock block = query_block(head, q_begin);

  const int64_t head_dim = padded(shape.head_dim), value_dim = padded(shape.value_dim);
  Arena arena(forward_floats(head_dim, value_dim));
  if (!arena.ok()) return false;
  const ForwardScratch scratch = forward_scratch(arena, head_dim, value_dim);
  pack_rows(head.query, q_begin, block.rows, call.options.scale, scratch.q,
            [](int) { return true; });
  for (int r = 0; r < block.rows; ++r) {
    scratch.max[r] = -kInfinity;
    store(scratch.sum.data + r * scratch.sum.row, Vec{});
    float* o = scratch.o.data + r * scratch.o.row;
    for (int64_t c = 0; c < scratch.o.row; c += kLanes) store(o + c, Vec{});
  }

  for (int64_t kv_begin = block.keys.begin / kBlockKv * kBlockKv; kv_begin < block.keys.end;
       kv_begin += kBlockKv) {
    Tile tile;
    if (make_tile(head, block, kv_begin, tile)) forward_tile(head, tile, scratch);
  }

  const float sink = call.sinks.data ? *floats_of(shape, call.sinks, batch, n) : -kInfinity;
  float* lse = floats_of(shape, call.lse, batch, n);
  char* out = address(shape, call.out, batch, n, size_of(call.out.dtype));
  const int64_t row_bytes = call.out.row * size_of(call.out.dtype);
  float* row = scratch.value.data;
  const int64_t q_end = min_of<int64_t>(q_begin + kBlockQ, shape.q_len);
  for (int64_t i = q_begin; i < q_end; ++i) {
    float row_lse = -kInfinity;
    if (i < head.q_len) {
      row_lse = finish_row(scratch, static_cast<int>(i - q_begin), sink, row);
    } else {
      for (int64_t c = 0; c < value_dim; c += kLanes) store(row + c, Vec{});
    }
    lse[i * call.lse.row] = row_lse;
    store_strided(row, shape.value_dim, out + i * row_bytes, call.out.dtype, 1);
  }
  return true;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
