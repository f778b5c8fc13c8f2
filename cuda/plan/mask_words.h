// Lays out masks as bits, in the order in which consumers of the sm_90 forward kernel read them. An
// earlier kernel converts them from bytes, once for all batch entries and heads that share them.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/mask_matrices.h"
#include "plan/recipes.h"

namespace jax_flash::sm90 {

// Describes the part of the workspace for mask words. They are ordered as
// [matrix, 64 rows, key tile, thread of a consumer warpgroup], a pair of words (AllowedBits)
// each. A mask with one row for all queries has one group of rows. After the words, each matrix and
// 64 rows have two ranges of tiles, one for each half of the keys: from the first tile that allows
// any pair to past the last one.
struct MaskWords : MaskMatrices {
  static constexpr int kThreads = 128, kRows = 64, kPairBytes = 8, kRangeBytes = 16;

  int32_t row_groups, tiles;

  MaskWords(const Shape& shape, const Operand& mask, int32_t block_kv)
      : MaskMatrices(shape, mask),
        row_groups(static_cast<int32_t>(ceil_div(rows, kRows))),
        tiles(static_cast<int32_t>(ceil_div(shape.kv_len, block_kv))) {}

  // Returns the number of pairs of words in a matrix.
  int64_t matrix() const { return int64_t{row_groups} * tiles * kThreads; }
  int64_t ranges_offset() const { return matrices() * matrix() * kPairBytes; }

  // `matrices`: the product of the mask's batch axes and heads; `rows`: T, or 1. A build without
  // some instances may run any head dim in the one with the smallest tiles.
  static int64_t bytes(const Shape& shape, int64_t matrices, int32_t rows) {
    const int64_t tiles = ceil_div(shape.kv_len, mask_words_keys(kMaxUndividedHeadDim));
    return matrices * ceil_div(rows, kRows) * (tiles * kThreads * kPairBytes + kRangeBytes);
  }

  static int64_t bytes(const Shape& shape, const Operand& mask) {
    const MaskMatrices matrices(shape, mask);
    return mask ? bytes(shape, matrices.matrices(), matrices.rows) : 0;
  }
};

}  // namespace jax_flash::sm90
