// Computes the backward pass in three steps:
//   1. delta
//   2. dkey and dvalue, and partial sums of dquery and of the gradients by distance
//   3. dquery and the gradients by distance, from the partial sums
//
// A task of the second step owns every `chunks`-th block of keys of one (batch, key/value head).
// Under a causal mask, more queries attend to early blocks, so each task gets early and late ones.
// The task takes a few of its blocks of keys at a time through all queries of all heads of the
// group, so that queries are packed once for these blocks. It accumulates dkey and dvalue of the
// blocks in scratch memory, and dquery in its own part of the workspace. The order is always the
// same.
#pragma once

#include "host/gradient.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Computes delta = rowsum(dout * out) - dlse of one (batch, head).
inline bool delta_task(const Backward& call, int64_t task) {
  const Shape& shape = call.shape;
  const int64_t batch = task / shape.heads, n = task % shape.heads;
  const int64_t q_len = length_of(shape, call.query_seq_lengths, batch, shape.q_len);
  const Rows out = rows_of(shape, call.out, batch, n, shape.value_dim);
  const Rows dout = rows_of(shape, call.dout, batch, n, shape.value_dim);
  const float* lse = floats_of(shape, call.lse, batch, n);
  const float* dlse = call.dlse.data ? floats_of(shape, call.dlse, batch, n) : nullptr;
  float* delta = delta_of(call, batch, n);
  with_type(out.dtype, [&]<typename T>(T*) {
    for (int64_t i = 0; i < shape.q_len; ++i) {
      delta[i] = 0.0f;
      if (i >= q_len || lse[i * call.lse.row] == -kInfinity) continue;
      const T* a = static_cast<const T*>(out.data) + i * out.row;
      const T* b = static_cast<const T*>(dout.data) + i * dout.row;
      Vec sum = {};
      for (int c = 0; c < out.dim; c += kLanes) {
        sum += load_first(a + c, out.dim - c) * load_first(b + c, out.dim - c);
      }
      delta[i] = reduce_add(sum) - (dlse ? dlse[i * call.dlse.row] : 0.0f);
    }
  });
  return true;
}

// Returns the partial dquery [T, padded(H)] of one chunk, batch and head.
inline float* partial_dquery(const Backward& call, int64_t chunk, int64_t batch, int64_t n) {
  const Shape& shape = call.shape;
  return static_cast<float*>(call.workspace) + delta_floats(shape) + chunk * dquery_floats(shape) +
         (batch * shape.heads + n) * shape.q_len * padded(shape.head_dim);
}

// Holds a block of keys and the gradients that the backward pass accumulates for it. Rows are
// padded.
struct BackwardBlock : KeyBlock {
  Matrix key;           // [kBlockKv, H]: zero for keys that no row of the tile may attend to
  uint64_t key_values;  // a bit for each row of `key` that holds a row of the block
  Matrix dkey;          // [kBlockKv, H]
  Matrix dvalue;        // [kBlockKv, h]
};

inline int64_t backward_block_floats(int64_t head_dim, int64_t value_dim) {
  return key_block_floats(head_dim, value_dim) + kBlockKv * (2 * head_dim + value_dim);
}

inline BackwardBlock backward_block(Arena& arena, int64_t head_dim, int64_t value_dim) {
  BackwardBlock block = {key_block(arena, head_dim, value_dim), {}, 0, {}, {}};
  block.key = {arena.take(kBlockKv * head_dim), head_dim};
  block.dkey = {arena.take(kBlockKv * head_dim), head_dim};
  block.dvalue = {arena.take(kBlockKv * value_dim), value_dim};
  return block;
}

// Returns how many blocks of keys a task takes through the queries together: as many as leave room
// for a block of queries in a second-level cache of 512 KiB.
inline constexpr int kMaxSharedBlocks = 4;
inline int64_t shared_blocks(int64_t head_dim, int64_t value_dim) {
  constexpr int64_t kFloats = 80 * 1024;
  const int64_t fitting = kFloats / backward_block_floats(head_dim, value_dim);
  return max_of<int64_t>(1, min_of<int64_t>(fitting, kMaxSharedBlocks));
}

// Writes ds to rows of block b and the tile's columns of dbias, if each element of dbias belongs to
// one logit. Elements outside the part of the tile that may be attended to become zeros.
inline void write_dbias(const Plane& dbias, const Shape& shape, int64_t b, const Tile& tile,
                        Matrix ds) {
  const int64_t begin = b * kBlockQ, end = min_of<int64_t>(begin + kBlockQ, shape.q_len);
  const auto cols = static_cast<int>(min_of<int64_t>(shape.kv_len - tile.kv_begin, kBlockKv));
  for (int64_t i = begin; i < end; ++i) {
    const int r = static_cast<int>(i - begin);
    const bool inside = r >= tile.row_begin && r < tile.row_end;
    float row[kBlockKv];
    for (int v = 0; v < kBlockKv / kLanes; ++v) {
      const bool computed = inside && v < tile.vectors();
      store(row + v * kLanes, computed ? load(ds.data + r * ds.row + v * kLanes) : Vec{});
    }
    store_strided(row, cols, dbias.at(i, tile.kv_begin, size_of(dbias.dtype)), dbias.dtype,
                  dbias.col);
  }
}

// Returns the partial sums of the gradients by distance of one chunk, batch and head.
inline DistanceSums partial_distance_sums(const Backward& call, int64_t chunk, int64_t batch,
                                          int64_t n) {
  const Shape& shape = call.shape;
  const int64_t count = distance_floats(call);
  float* sums = static_cast<float*>(call.workspace) + delta_floats(shape) +
                backward_chunks(shape) * dquery_floats(shape) +
                ((chunk * shape.batch + batch) * shape.heads + n) * count;
  DistanceSums partial;
  if (call.dalibi_slopes.data) partial.slope = sums;
  if (call.drelative_bias.data) partial.table = sums + (partial.slope ? 1 : 0);
  return partial;
}

// Points to the results of one head, except dkey and dvalue.
struct HeadGradients {
  Matrix dquery;  // [T, H]: a partial sum
  Plane dbias;    // absent if another pass computes it
  DistanceSums distance;

  bool goes_by_distance() const { return distance.slope || distance.table; }
};

// Adds the contributions of one tile to keys.dkey, keys.dvalue and the partial dquery.
inline void backward_tile(const GradientHead& head, const Tile& tile, BackwardBlock& keys,
                          GradientScratch& scratch, Matrix dquery) {
  if (keys.key_values != tile.any) {
    pack_rows(head.key, keys.begin, tile.cols, 1.0f, keys.key,
              [&](int c) { return tile.any >> c & 1; });
    keys.key_values = tile.any;
  }
  const int r0 = tile.row_begin, rows = tile.rows();
  const Matrix p = from_row(scratch.s, r0), ds = from_row(scratch.ds, r0);
  gemm({tile.cols, head.value.dim, rows, true}, transposed(p), from_row(scratch.dout, r0),
       keys.dvalue);
  gemm({tile.cols, head.key.dim, rows, true}, transposed(ds), from_row(scratch.q, r0), keys.dkey);
  gemm({rows, head.key.dim, tile.cols, true}, as_left(ds), keys.key,
       from_row(dquery, tile.q_begin + r0));
}

// Takes all queries of one head through `count` blocks of keys.
inline void backward_head(const GradientHead& head, const Shape& shape, BackwardBlock* keys,
                          int64_t count, GradientScratch& scratch, const HeadGradients& to) {
  for (int64_t b = 0; b < q_blocks(shape); ++b) {
    const QueryBlock block = query_block(head, b * kBlockQ);
    for (int64_t k = 0; k < count; ++k) {
      Tile tile;
      const bool any = make_tile(head, block, keys[k].begin, scratch.s, tile);
      if (any) {
        gradient_tile(head, tile, keys[k], scratch);
      } else {
        tile.kv_begin = keys[k].begin;
        tile.row_begin = tile.row_end = tile.cols = 0;
      }
      if (to.dbias.data) write_dbias(to.dbias, shape, b, tile, scratch.ds);
      if (!any) continue;
      if (to.goes_by_distance()) add_distance_gradients(head, tile, scratch.ds, to.distance);
      backward_tile(head, tile, keys[k], scratch, to.dquery);
    }
  }
}

// Computes dkey and dvalue of `count` blocks of keys of one (batch, key/value head).
inline void backward_keys(const Backward& call, int64_t chunk, int64_t batch, int64_t kv_head,
                          BackwardBlock* keys, int64_t count, GradientScratch& scratch) {
  const Shape& shape = call.shape;
  const int64_t group = shape.heads / shape.kv_heads;
  const bool writes_dbias = call.dbias.data && keeps_every_axis(shape, call.dbias);
  for (int64_t k = 0; k < count; ++k) {
    clear(keys[k].dkey, kBlockKv);
    clear(keys[k].dvalue, kBlockKv);
  }
  for (int64_t n = kv_head * group; n < (kv_head + 1) * group; ++n) {
    HeadGradients to = {{partial_dquery(call, chunk, batch, n), keys->key.row},
                        {},
                        partial_distance_sums(call, chunk, batch, n)};
    if (writes_dbias) to.dbias = plane_of(shape, call.dbias, batch, n, size_of(call.dbias.dtype));
    backward_head(gradient_head_of(call, batch, n), shape, keys, count, scratch, to);
  }
  const Rows dkey = rows_of(shape, call.dkey, batch, kv_head, shape.head_dim);
  const Rows dvalue = rows_of(shape, call.dvalue, batch, kv_head, shape.value_dim);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t begin = keys[k].begin;
    const int rows = static_cast<int>(min_of<int64_t>(shape.kv_len - begin, kBlockKv));
    write_rows(keys[k].dkey, rows, dkey, begin);
    write_rows(keys[k].dvalue, rows, dvalue, begin);
  }
}

inline bool backward_task(const Backward& call, int64_t task) {
  const Shape& shape = call.shape;
  const int64_t chunks = backward_chunks(shape), chunk = task % chunks;
  const int64_t batch = task / chunks / shape.kv_heads, kv_head = task / chunks % shape.kv_heads;
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t head_dim = padded(shape.head_dim), value_dim = padded(shape.value_dim);
  const int64_t own = ceil_div(kv_blocks(shape) - chunk, chunks);
  const int64_t shared = max_of<int64_t>(1, min_of(shared_blocks(head_dim, value_dim), own));

  Arena arena(gradient_floats(head_dim, value_dim) +
              shared * backward_block_floats(head_dim, value_dim));
  if (!arena.ok()) return false;
  GradientScratch scratch = gradient_scratch(arena, head_dim, value_dim);
  BackwardBlock keys[kMaxSharedBlocks];
  for (int64_t k = 0; k < shared; ++k) keys[k] = backward_block(arena, head_dim, value_dim);

  for (int64_t n = kv_head * group; n < (kv_head + 1) * group; ++n) {
    clear({partial_dquery(call, chunk, batch, n), head_dim}, shape.q_len);
    const DistanceSums sums = partial_distance_sums(call, chunk, batch, n);
    if (sums.slope) *sums.slope = 0.0f;
    for (int64_t r = 0; sums.table && r < call.distances; ++r) sums.table[r] = 0.0f;
  }
  for (int64_t first = 0; first < own; first += shared) {
    const int64_t count = min_of(shared, own - first);
    for (int64_t k = 0; k < count; ++k) {
      keys[k].begin = ((first + k) * chunks + chunk) * kBlockKv;
      keys[k].packed = false;
      keys[k].key_values = 0;
    }
    backward_keys(call, chunk, batch, kv_head, keys, count, scratch);
  }
  return true;
}

// Computes dquery = scale * the sum of its parts, for a block of queries of one (batch, head).
inline bool reduce_dquery_task(const Backward& call, int64_t task) {
  const Shape& shape = call.shape;
  const int64_t blocks = q_blocks(shape), chunks = backward_chunks(shape);
  const int64_t batch = task / blocks / shape.heads, n = task / blocks % shape.heads;
  const int64_t begin = task % blocks * kBlockQ;
  const int64_t end = min_of<int64_t>(begin + kBlockQ, shape.q_len);
  const int64_t head_dim = padded(shape.head_dim), stride = dquery_floats(shape);
  const Rows dquery = rows_of(shape, call.dquery, batch, n, shape.head_dim);
  float* parts = partial_dquery(call, 0, batch, n) + begin * head_dim;
  for (int64_t c = 0; c < (end - begin) * head_dim; c += kLanes) {
    Vec sum = load(parts + c);
    for (int64_t chunk = 1; chunk < chunks; ++chunk) sum += load(parts + chunk * stride + c);
    store(parts + c, sum * call.options.scale);
  }
  write_rows({parts, head_dim}, static_cast<int>(end - begin), dquery, begin);
  return true;
}

// Adds up the parts of the gradients by distance, for one (batch, head).
inline bool reduce_distance_task(const Backward& call, int64_t task) {
  const Shape& shape = call.shape;
  const int64_t batch = task / shape.heads, n = task % shape.heads;
  const int64_t chunks = backward_chunks(shape);
  float *slope = nullptr, *table = nullptr;
  if (call.dalibi_slopes.data) {
    slope = floats_of(shape, call.dalibi_slopes, batch, n);
    *slope = 0.0f;
  }
  if (call.drelative_bias.data) {
    table = floats_of(shape, call.drelative_bias, batch, n);
    for (int64_t r = 0; r < call.distances; ++r) table[r] = 0.0f;
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const DistanceSums part = partial_distance_sums(call, chunk, batch, n);
    if (slope) *slope += *part.slope;
    for (int64_t r = 0; table && r < call.distances; ++r) table[r] += part.table[r];
  }
  return true;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
