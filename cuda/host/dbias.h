// Computes the gradient of a broadcast bias, in a pass of its own. A task owns one tile of dbias.
// It sums the gradients of all logits to which an element was added, over all batches, heads, rows
// and columns along which dbias is broadcast. So the memory does not grow with the logits, and the
// order of the sums is fixed.
#pragma once

#include "host/gradient.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Returns the batch whose index is given by `kept` along the batch axes of dbias, and by `summed`
// along the broadcast ones.
inline int64_t batch_of(const Shape& shape, const Operand& dbias, int64_t kept, int64_t summed) {
  int64_t batch = 0, stride = 1;
  for (int axis = shape.num_batch_dims - 1; axis >= 0; --axis) {
    const int64_t dim = shape.batch_dims[axis];
    int64_t& index = dbias.batch[axis] != 0 ? kept : summed;
    batch += index % dim * stride;
    index /= dim;
    stride *= dim;
  }
  return batch;
}

// Returns the offset in dbias of index `kept` of its own batch axes. The others may be empty.
inline int64_t kept_offset(const Shape& shape, const Operand& dbias, int64_t kept) {
  int64_t offset = 0;
  for (int axis = shape.num_batch_dims - 1; axis >= 0; --axis) {
    if (dbias.batch[axis] == 0) continue;
    offset += kept % shape.batch_dims[axis] * dbias.batch[axis];
    kept /= shape.batch_dims[axis];
  }
  return offset;
}

struct BlockRange {
  int64_t begin, end;
};

// Adds the gradients of the given blocks of one (batch, head) to `sum`.
inline void add_head(const GradientHead& head, BlockRange q_range, BlockRange kv_range,
                     GradientScratch& scratch, KeyBlock& keys, Matrix sum) {
  for (int64_t k = kv_range.begin; k < kv_range.end; ++k) {
    keys.begin = k * kBlockKv;
    keys.packed = false;
    for (int64_t q = q_range.begin; q < q_range.end; ++q) {
      const QueryBlock block = query_block(head, q * kBlockQ);
      Tile tile;
      if (!make_tile(head, block, keys.begin, scratch.s, tile)) continue;
      gradient_tile(head, tile, keys, scratch);
      for (int r = tile.row_begin; r < tile.row_end; ++r) {
        const float* ds = scratch.ds.data + r * scratch.ds.row;
        float* to = sum.data + r * sum.row;
        for (int v = 0; v < tile.vectors(); ++v) {
          store(to + v * kLanes, load(to + v * kLanes) + load(ds + v * kLanes));
        }
      }
    }
  }
}

// Adds all rows to row 0.
inline void sum_rows(Matrix m) {
  for (int r = 1; r < kBlockQ; ++r) {
    for (int c = 0; c < kBlockKv; c += kLanes) {
      store(m.data + c, load(m.data + c) + load(m.data + r * m.row + c));
    }
  }
}

// Adds all columns to column 0.
inline void sum_columns(Matrix m) {
  for (int r = 0; r < kBlockQ; ++r) {
    Vec sum = {};
    for (int c = 0; c < kBlockKv; c += kLanes) sum += load(m.data + r * m.row + c);
    m.data[r * m.row] = reduce_add(sum);
  }
}

inline bool dbias_task(const Backward& call, int64_t task) {
  const Shape& shape = call.shape;
  const Operand& dbias = call.dbias;
  const BiasTiling tiling = bias_tiling(shape, dbias);
  const int64_t kv_tile = task % tiling.kv_tiles;
  const int64_t q_tile = task / tiling.kv_tiles % tiling.q_tiles;
  const int64_t head_tile = task / tiling.kv_tiles / tiling.q_tiles % tiling.heads;
  const int64_t kept = task / tiling.kv_tiles / tiling.q_tiles / tiling.heads;
  const bool keeps_rows = dbias.row != 0, keeps_cols = dbias.col != 0;
  const BlockRange q_range = {keeps_rows ? q_tile : 0, keeps_rows ? q_tile + 1 : q_blocks(shape)};
  const BlockRange kv_range = {keeps_cols ? kv_tile : 0,
                               keeps_cols ? kv_tile + 1 : kv_blocks(shape)};
  const BlockRange heads = {dbias.head != 0 ? head_tile : 0,
                            dbias.head != 0 ? head_tile + 1 : int64_t{shape.heads}};

  const int64_t head_dim = padded(shape.head_dim), value_dim = padded(shape.value_dim);
  Arena arena(gradient_floats(head_dim, value_dim) + key_block_floats(head_dim, value_dim) +
              kBlockQ * kBlockKv);
  if (!arena.ok()) return false;
  GradientScratch scratch = gradient_scratch(arena, head_dim, value_dim);
  KeyBlock keys = key_block(arena, head_dim, value_dim);
  const Matrix sum = {arena.take(kBlockQ * kBlockKv), kBlockKv};
  for (int64_t c = 0; c < kBlockQ * kBlockKv; c += kLanes) store(sum.data + c, Vec{});

  for (int64_t summed = 0; summed < shape.batch / tiling.batches; ++summed) {
    const int64_t batch = batch_of(shape, dbias, kept, summed);
    for (int64_t n = heads.begin; n < heads.end; ++n) {
      add_head(gradient_head_of(call, batch, n), q_range, kv_range, scratch, keys, sum);
    }
  }
  if (!keeps_rows) sum_rows(sum);
  if (!keeps_cols) sum_columns(sum);

  const int64_t i = q_tile * kBlockQ, j = kv_tile * kBlockKv;
  const int64_t rows = keeps_rows ? min_of<int64_t>(shape.q_len - i, kBlockQ) : 1;
  const int64_t cols = keeps_cols ? min_of<int64_t>(shape.kv_len - j, kBlockKv) : 1;
  const int64_t offset = kept_offset(shape, dbias, kept) + head_tile * dbias.head;
  const Plane plane = {static_cast<char*>(dbias.data) + offset * size_of(dbias.dtype), dbias.dtype,
                       dbias.row, dbias.col};
  for (int64_t r = 0; r < rows; ++r) {
    store_strided(sum.data + r * sum.row, static_cast<int>(cols),
                  plane.at(i + r, j, size_of(dbias.dtype)), dbias.dtype, dbias.col);
  }
  return true;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
