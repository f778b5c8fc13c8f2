// Computes the forward pass. A task takes some blocks of queries of one (batch, head) or, if each
// head has only one block, the blocks of several heads of a group. It goes through the keys and
// values that these blocks share, tile by tile.
#pragma once

#include "host/dropout.h"
#include "host/logits.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Holds the state of the online softmax for one block of queries of one head, in float32. Rows of q
// and o are padded.
struct Accumulators {
  Matrix q;    // [rows, H]: scale * query
  Matrix o;    // [rows, h]: sum of exp(logits - max) value
  Matrix sum;  // [rows, kLanes]: sum of exp(logits - max), by lane
  float* max;  // [rows]: running maximum
};

// Holds one block of queries of one head, and its state.
struct Stream {
  int64_t n;
  Head head;
  QueryBlock block;
  Accumulators acc;
};

// Scratch memory that the streams of a task use in turn.
struct ForwardScratch {
  Matrix s;         // [kBlockQ, kBlockKv]: logits, then probabilities
  Matrix key_t;     // [H, kBlockKv]
  Matrix value;     // [kBlockKv, h]: zero for keys that no row of the tile may attend to
  bool has_key;     // true if key_t holds the current block of keys
  uint64_t values;  // a bit for each row of `value` that holds a row of the current block
};

inline int64_t forward_floats(int64_t head_dim, int64_t value_dim, int64_t rows, int64_t streams) {
  return (head_dim + value_dim) * kBlockKv + kBlockQ * kBlockKv +
         streams * (rows * (head_dim + value_dim + kRowPadding) + padded(rows));
}

inline ForwardScratch forward_scratch(Arena& arena, int64_t head_dim, int64_t value_dim) {
  ForwardScratch scratch = {};
  scratch.s = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  scratch.key_t = {arena.take(head_dim * kBlockKv), kBlockKv};
  scratch.value = {arena.take(kBlockKv * value_dim), value_dim};
  return scratch;
}

inline Accumulators accumulators(Arena& arena, const Head& head, const QueryBlock& block,
                                 int64_t rows) {
  const int64_t head_dim = padded(head.key.dim), value_dim = padded(head.value.dim);
  Accumulators acc;
  acc.q = {arena.take(rows * head_dim), head_dim};
  acc.o = {arena.take(rows * value_dim), value_dim};
  acc.sum = {arena.take(rows * kRowPadding), kRowPadding};
  acc.max = arena.take(padded(rows));
  pack_rows(head.query, block.begin, block.rows, head.options->scale, acc.q,
            [](int) { return true; });
  clear(acc.o, rows);
  clear(acc.sum, rows);
  for (int64_t r = 0; r < rows; ++r) acc.max[r] = -kInfinity;
  return acc;
}

// The vectors in a row of a tile of logits, which has kBlockKv columns.
inline constexpr int kRowVectors = kBlockKv / kLanes;

// A step of the online softmax consists of two loops over the rows, so that the exponentials of a
// row do not wait for its maximum, and those of several rows overlap.
//
// First loop: updates the running maximum of row r. If it rises, rescales the row's sum and output.
// A NaN never becomes the maximum, but it reaches the sum and, through the product with V, the
// output.
inline void raise_max(const Accumulators& acc, int r, const float* s) {
  Vec top = splat(acc.max[r]);
  for (int v = 0; v < kRowVectors; ++v) top = max_ignoring_nan(top, load(s + v * kLanes));
  const float new_max = reduce_max(top);
  if (!(new_max > acc.max[r])) return;
  const Vec rescale = exp(splat(acc.max[r] - new_max));
  float* sum = acc.sum.data + r * acc.sum.row;
  store(sum, load(sum) * rescale);
  float* o = acc.o.data + r * acc.o.row;
  for (int64_t c = 0; c < acc.o.row; c += kLanes) store(o + c, load(o + c) * rescale);
  acc.max[r] = new_max;
}

// Second loop: replaces the logits of row r by exp(logits - max), and adds these to the sum.
inline void exponentials(const Accumulators& acc, int r, float* s) {
  const float max = acc.max[r];
  const float base = max == -kInfinity ? 0.0f : max;  // -inf - -inf is NaN
  float* sum = acc.sum.data + r * acc.sum.row;
  Vec total = load(sum);
  constexpr int kTogether = 4;
  for (int v = 0; v < kRowVectors; v += kTogether) {
    float* at = s + v * kLanes;
    Vec p[kTogether];
    each<kTogether>([&](int i) { p[i] = load(at + i * kLanes) - base; });
    exp(p);
    each<kTogether>([&](int i) { store(at + i * kLanes, p[i]); });
    each<kTogether>([&](int i) { total += p[i]; });
  }
  store(sum, total);
}

inline void drop_row(const Head& head, const Tile& tile, uint64_t keep, float* p) {
  for (int v = 0; v < tile.vectors(); ++v) {
    const Vec scaled = load(p + v * kLanes) * head.options->dropout_scale;
    store(p + v * kLanes, lanes_set(keep, v) ? scaled : Vec{});
  }
}

inline void forward_tile(const Head& head, const Tile& tile, const Accumulators& acc,
                         ForwardScratch& scratch) {
  if (!scratch.has_key) {
    const auto cols = static_cast<int>(min_of<int64_t>(head.kv_len - tile.kv_begin, kBlockKv));
    pack_columns(head.key, tile.kv_begin, cols, scratch.key_t);
    scratch.has_key = true;
  }
  if (scratch.values != tile.any) {
    pack_rows(head.value, tile.kv_begin, tile.cols, 1.0f, scratch.value,
              [&](int c) { return tile.any >> c & 1; });
    scratch.values = tile.any;
  }
  start_logits(head, tile, acc.q, scratch.key_t, scratch.s);
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    float* s = scratch.s.data + r * scratch.s.row;
    finish_logits_row(head, tile, r, s);
    for (int v = tile.vectors(); v < kRowVectors; ++v) store(s + v * kLanes, splat(-kInfinity));
    raise_max(acc, r, s);
  }
  const bool drops = head.options->dropout_threshold != 0;
  uint64_t keep[kBlockQ];
  if (drops) keep_bits(head, tile, keep);
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    float* s = scratch.s.data + r * scratch.s.row;
    exponentials(acc, r, s);
    if (drops) drop_row(head, tile, keep[r], s);
  }
  gemm({tile.rows(), head.value.dim, tile.cols, true}, as_left(from_row(scratch.s, tile.row_begin)),
       scratch.value, from_row(acc.o, tile.row_begin));
}

// Holds a number as the sum of the nearest float and the rounding error of that float.
struct TwoFloats {
  float high, low;
};

// Returns a + b, exactly if the sum is finite.
// Reference: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
inline TwoFloats two_sum(float a, float b) {
  const float sum = a + b, second = sum - a;
  return {sum, (a - (sum - second)) + (b - second)};
}

// Finishes row r: writes its output to `out`, and returns lse = max + log(sum). The sum includes
// the sink, a logit without a value.
inline TwoFloats finish_row(const Accumulators& acc, int r, float sink, float* out) {
  const float max = max_of(acc.max[r], sink);
  const float base = max == -kInfinity ? 0.0f : max;
  const float rescale = exp(acc.max[r] - base);
  const float sum = reduce_add(load(acc.sum.data + r * acc.sum.row)) * rescale + exp(sink - base);
  const float* o = acc.o.data + r * acc.o.row;
  const Vec weight = splat(rescale / sum);
  for (int64_t c = 0; c < acc.o.row; c += kLanes) {
    store(out + c, sum == 0.0f ? Vec{} : load(o + c) * weight);
  }
  if (sum == 0.0f) return {-kInfinity, 0.0f};
  return two_sum(base, __builtin_logf(sum));
}

// Writes out and lse of all rows of the block, also of rows beyond the query length.
inline void finish_block(const Forward& call, int64_t batch, int64_t n, const QueryBlock& block,
                         const Accumulators& acc) {
  const Shape& shape = call.shape;
  const float sink = call.sinks.data ? *floats_of(shape, call.sinks, batch, n) : -kInfinity;
  const Rows out = rows_of(shape, call.out, batch, n, shape.value_dim);
  float* lse = floats_of(shape, call.lse, batch, n);
  float* lse_low = call.lse_low.data ? floats_of(shape, call.lse_low, batch, n) : nullptr;
  const int64_t rows = min_of<int64_t>(shape.q_len - block.begin, kBlockQ);
  for (int r = 0; r < rows; ++r) {
    float* o = acc.o.data + r * acc.o.row;  // zero in rows past the query length
    const TwoFloats row_lse =
        r < block.rows ? finish_row(acc, r, sink, o) : TwoFloats{-kInfinity, 0.0f};
    lse[(block.begin + r) * call.lse.row] = row_lse.high;
    if (lse_low) lse_low[(block.begin + r) * call.lse_low.row] = row_lse.low;
  }
  write_rows(acc.o, static_cast<int>(rows), out, block.begin);
}

// Returns the smallest span that contains the keys of all streams.
inline Span keys_of(const Stream* streams, int64_t count) {
  Span keys = {INT64_MAX, 0};
  for (int64_t i = 0; i < count; ++i) {
    const Span own = streams[i].block.keys;
    if (own.begin >= own.end) continue;
    keys = {min_of(keys.begin, own.begin), max_of(keys.end, own.end)};
  }
  return keys;
}

inline bool forward_task(const ForwardTasks& tasks, int64_t task) {
  const Forward& call = tasks.call;
  const ForwardSplit& split = tasks.split;
  const Shape& shape = call.shape;
  // Under a causal mask, later blocks attend to more keys. They come first, so that long tasks
  // start first.
  const int64_t first_block = (split.runs - 1 - task % split.runs) * split.blocks;
  const int64_t blocks = min_of(split.blocks, q_blocks(shape) - first_block);
  const int64_t part = task / split.runs % split.parts;
  const int64_t kv_head = task / split.runs / split.parts % shape.kv_heads;
  const int64_t batch = task / split.runs / split.parts / shape.kv_heads;
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t heads = min_of(split.heads, group - part * split.heads);
  if (blocks <= 0) return true;

  const int64_t head_dim = padded(shape.head_dim), value_dim = padded(shape.value_dim);
  const int64_t rows = min_of<int64_t>(shape.q_len, kBlockQ), count = heads * blocks;
  Arena arena(forward_floats(head_dim, value_dim, rows, count));
  if (!arena.ok()) return false;
  ForwardScratch scratch = forward_scratch(arena, head_dim, value_dim);
  Stream streams[max_of(kMaxHeadsPerTask, kMaxBlocksPerTask)];
  for (int64_t i = 0; i < count; ++i) {
    Stream& stream = streams[i];
    stream.n = kv_head * group + part * split.heads + i / blocks;
    stream.head = head_of(call, batch, stream.n);
    stream.block = query_block(stream.head, (first_block + i % blocks) * kBlockQ);
    stream.acc = accumulators(arena, stream.head, stream.block, rows);
  }
  const Span keys = keys_of(streams, count);
  for (int64_t kv_begin = keys.begin / kBlockKv * kBlockKv; kv_begin < keys.end;
       kv_begin += kBlockKv) {
    scratch.has_key = false;
    scratch.values = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Stream& stream = streams[i];
      Tile tile;
      if (make_tile(stream.head, stream.block, kv_begin, scratch.s, tile)) {
        forward_tile(stream.head, tile, stream.acc, scratch);
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    finish_block(call, batch, streams[i].n, streams[i].block, streams[i].acc);
  }
  return true;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
