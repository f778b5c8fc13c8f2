// Masks as bits in the order in which consumers of the sm_90 forward kernel read them, which a
// kernel before it makes of bytes: once for all batches and heads that share them.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash::sm90 {

// In the workspace: for each matrix that the mask has, each 64 of its rows, or its only one, and
// each tile of keys, a pair of words (AllowedBits) for each of a consumer's threads. Behind these,
// for each matrix and 64 rows, from the first tile with anything allowed to behind the last: for
// both halves of the keys.
struct MaskWords {
  static constexpr int kThreads = 128, kRows = 64, kPairBytes = 8, kRangeBytes = 16;

  int32_t batch[2] = {1, 1}, heads = 1;  // of which the mask has a matrix each
  int32_t row_groups = 1, tiles = 0;

  MaskWords(const Shape& shape, const Operand& mask, int32_t block_kv) {
    const auto many = [](int64_t stride, int64_t count) {
      return stride == 0 ? 1 : static_cast<int32_t>(count);
    };
    for (int axis = 0; axis < 2 && axis < shape.num_batch_dims; ++axis) {
      batch[axis] = many(mask.batch[axis], shape.batch_dims[axis]);
    }
    heads = many(mask.head, shape.heads);
    row_groups = parts(many(mask.row, shape.q_len), kRows);
    tiles = parts(shape.kv_len, block_kv);
  }

  int64_t matrices() const { return int64_t{batch[0]} * batch[1] * heads; }
  // Pairs of words of a matrix.
  int64_t matrix() const { return int64_t{row_groups} * tiles * kThreads; }
  int64_t ranges_offset() const { return matrices() * matrix() * kPairBytes; }

  // `matrices`: the product of the mask's batch axes and heads; `rows`: T, or 1.
  static int64_t bytes(const Shape& shape, int64_t matrices, int32_t rows) {
    const int32_t head_dim = shape.head_dim > shape.value_dim ? shape.head_dim : shape.value_dim;
    const int64_t tiles = parts(shape.kv_len, block_kv(head_dim));
    return matrices * parts(rows, kRows) * (tiles * kThreads * kPairBytes + kRangeBytes);
  }

  // Keys of a tile of the kernel for this head dim.
  static constexpr int32_t block_kv(int32_t head_dim) { return head_dim <= 128 ? 128 : 80; }

 private:
  static int32_t parts(int32_t length, int32_t part) {
    return length / part + (length % part != 0);
  }
};

}  // namespace jax_flash::sm90
