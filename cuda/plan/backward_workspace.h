// Lays out the workspace of the backward pass, through which its kernels pass intermediate results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/mask_matrices.h"
#include "plan/modifiers.h"
#include "plan/segment_spans.h"

namespace jax_flash {

inline constexpr int kMaxBlockQ = 128;  // a multiple of every kBlockQ

// Up to this many query rows, a head has only one query tile in the sm_90 kernels.
inline constexpr int kOneTileRows = 64;

// A deterministic call has a second sum of dquery up to this head dim and with more than this many
// queries (sm90/backward/config.cuh).
inline constexpr int kTwoSumsHeadDim = 64, kTwoSumsRows = 128;

// The rows and columns of a tile whose dS is summed along diagonals, and the number of sums for a
// diagonal of such tiles: one for each diagonal in a tile, and one more.
inline constexpr int kDistanceBlock = 64, kDistanceSums = 2 * kDistanceBlock;

inline constexpr int kMaxPersistentBlocks = 256;  // the most blocks with a counter of their own

// Limits for thread blocks that divide the queries of a block of keys (sm90/backward/split.cuh):
// the most blocks of keys that are divided, the keys of a block, and the greatest head dim. Two
// consumers add to the sums of a block.
inline constexpr int kSplitBlocks = 132, kSplitKeys = 128, kSplitHeadDim = 128;
inline constexpr int kSplitConsumers = 2;

// Above kSplitHeadDim, one sm_90 kernel computes all gradients up to these head dims of queries and
// values, unless the call is deterministic.
inline constexpr int kOneKernelHeadDim = 192, kOneKernelValueDim = 128;

// Returns whether that kernel may take calls of this shape. `widest` is the instance's head dim.
inline bool fits_one_kernel(const Shape& shape, int64_t widest) {
  return widest == kOneKernelHeadDim && shape.value_dim <= kOneKernelValueDim;
}

// Returns whether sm_90 blocks may take a part of a key block each, and add up their sums.
inline bool may_divide_keys(const Shape& shape, int64_t widest) {
  return widest <= kSplitHeadDim || fits_one_kernel(shape, widest);
}
// Returns the number of columns of dK and dV together, in the sums for a block of keys.
constexpr int64_t sum_columns(int64_t widest) {
  return widest + std::min<int64_t>(widest, kOneKernelValueDim);
}

// Returns the number of rows for which a head's sums for dquery have room. Lane l of a warp holds
// elements of rows l / 4 and l / 4 + 8 of 16, and they are contiguous. If fewer than 8 rows are
// left at the end, each therefore takes the space of two, and 8 or more take the space of 16.
template <typename Integer>
JAX_FLASH_HOST_DEVICE constexpr Integer dquery_rows_of(Integer rows) {
  const Integer rest = rows % 16;
  return rows - rest + (rest < 8 ? rest : 8) * 2;
}

// Returns the number of lanes that hold accumulators of a tile's first `rows` rows. These lanes
// come first.
JAX_FLASH_HOST_DEVICE constexpr int32_t fragment_lanes(int32_t rows) {
  return dquery_rows_of(rows) * 2;
}

constexpr bool lanes_suffice(int32_t rows) {
  for (int32_t row = 0; row < rows; ++row) {
    if (row / 16 * 32 + row % 8 * 4 + 3 >= fragment_lanes(rows)) return false;
  }
  const int32_t room = dquery_rows_of(rows);
  return room >= rows && room <= 2 * rows && room <= rows + 8 && room % 2 == 0 &&
         dquery_rows_of(rows + 64) == room + 64;
}
static_assert([] {
  for (int32_t rows = 0; rows <= 64; ++rows) {
    if (!lanes_suffice(rows)) return false;
  }
  return true;
}());

// The features of a call, besides its shape, that decide how much workspace the backward pass
// needs.
struct BackwardFeatures {
  bool segments = false, deterministic = false;
  bool distances = false;     // the gradient of slopes or of a relative bias is wanted
  bool banded = false;        // causal, or with a window
  int64_t mask_matrices = 0;  // the product of the mask's batch axes and heads
  int32_t mask_rows = 0;      // T, or 1
  bool is_float32 = false;    // true if the operands are float32
  bool exact = false;         // true if products are as exact as those of float32
  bool sm90 = true;           // false for the sm_80 kernels, which need less

  static BackwardFeatures of(const Backward& params) {
    const Options& options = params.options;
    BackwardFeatures features;
    features.segments = bool{params.query_segment_ids};
    features.deterministic = options.deterministic;
    features.distances = distance_floats(params) > 0;
    features.banded = jax_flash::banded(options);
    const sm90::MaskMatrices mask(params.shape, params.mask);
    features.mask_matrices = params.mask ? mask.matrices() : 0;
    features.mask_rows = mask.rows;
    features.is_float32 = params.query.dtype == DType::kFloat32;
    features.exact = options.high_precision;
    return features;
  }
};

// Returns how many query heads a block of keys visits on sm_90, if one kernel computes all
// gradients: all heads of its group, or only one or two. In the second case, the blocks of a group
// add up their dK and dV, in sums that take at most as much memory as those for dquery.
//
// Fewer heads per block give enough blocks for all multiprocessors even with few key heads.
// Besides, causal blocks differ in length. If each of them visits a whole group, those that run
// together drift apart, until they read more query heads than L2 holds. The thresholds were
// measured: TUNING_backward.md.
inline int32_t heads_of_key_block(const Shape& shape, int64_t widest,
                                  const BackwardFeatures& features) {
  constexpr int64_t kLeastRows = 512, kBlocks = kSplitBlocks, kCacheBytes = int64_t{40} << 20;
  const int64_t group = shape.heads / std::max(shape.kv_heads, 1);
  const int64_t tiles = ceil_div(shape.kv_len, kSplitKeys);
  const int64_t row_bytes = 8 * widest;  // of Q, dO and the sums for dquery
  const bool fits = int64_t{shape.kv_heads} * shape.kv_len * sum_columns(widest) <=
                    int64_t{shape.heads} * shape.q_len * shape.head_dim;
  const bool divides = may_divide_keys(shape, widest);
  if (!features.sm90 || features.is_float32 || features.deterministic || !divides || group <= 1 ||
      tiles <= 0 || shape.q_len < kLeastRows || !fits) {
    return static_cast<int32_t>(group);
  }
  const auto blocks = [&](int64_t heads) { return tiles * shape.batch * (shape.heads / heads); };
  if (!features.banded) {
    return static_cast<int32_t>(5 * blocks(group) < 4 * kBlocks ? 1 : group);
  }
  const int64_t running = std::min(kBlocks / tiles + 1, shape.batch * shape.kv_heads);
  if (blocks(group) >= 2 * kBlocks && running * group * shape.q_len * row_bytes <= kCacheBytes) {
    return static_cast<int32_t>(group);
  }
  return group % 2 == 0 && 10 * blocks(2) >= 18 * kBlocks ? 2 : 1;
}

struct BackwardWorkspace {
  SegmentSpans spans;  // pointers are null without segment ids
  // [batch, N, rows] each. lse_log2 is lse in the units of the logits, mostly log2; delta is
  // sum(dout * out) - dlse. Rows that attend to nothing, and rows beyond T, have +inf and 0. A head
  // has a multiple of kMaxBlockQ rows, so that whole tiles can be copied. Up to kOneTileRows, this
  // could take more memory than dquery, so a head then has a multiple of 4 rows, for copies of 16
  // bytes. From index `padding` on, after the rows of the last head, there are kMaxBlockQ more rows
  // with the values of rows beyond T.
  float* lse_log2;
  float* delta;
  int64_t padding;
  // [batch, N, dquery_rows, head dim]: sums for dquery / scale. The elements of a tile are in the
  // order of accumulator fragments, without the lanes and columns that dquery does not have. sm_90:
  // tiles of 64 rows, [block of 8 columns][lane][element]. sm_80: tiles of kBlockQ rows, see
  // DqueryOrder. Null for float32, whose dquery itself holds the sums, and above
  // kMaxUndividedHeadDim.
  float* dquery;
  // A second sum for the blocks of odd key tiles, for deterministic calls that have two; or null.
  float* odd_dquery;
  // For deterministic calls. [batch, N, flags]: counters of the blocks that have added to a query
  // tile. One ticket follows.
  int32_t* turns;
  int32_t* ticket;
  // Counters of the persistent blocks on sm_90: see sm90/backward/plan.cuh.
  int32_t* counters;
  // Sums for dK and dV of blocks of keys whose queries are divided: [at most kSplitBlocks,
  // kSplitKeys, sum_columns()] in fragment order, or null. With a mask: sm90/backward/mask.cuh.
  float* split_sums;
  int64_t split_sums_bytes;
  // Sums for dK and dV of blocks of keys that visit only some heads of their group: [batch, K,
  // blocks of kSplitKeys keys, kSplitKeys, sum_columns()], or null.
  float* group_sums;
  int32_t heads_of_key_block;
  // A mask as bits (sm90/backward/mask.cuh), or null.
  uint32_t* mask_words;
  // [batch, N, diagonals of tiles, kDistanceSums]: sums of dS along diagonals, or null. See
  // modifiers/distance_gradient.cuh.
  float* diagonals;
  int32_t rows, dquery_rows, flags;  // per head

  // Returns the index of a row's lse_log2 and delta.
  JAX_FLASH_HOST_DEVICE int64_t row_index(int64_t batch_head, int32_t row) const {
    return row < rows ? batch_head * rows + row : padding;
  }

  // Returns the number of diagonals of tiles of kDistanceBlock queries and as many keys.
  static int64_t tile_diagonals(const Shape& shape) {
    return ceil_div(shape.q_len, kDistanceBlock) + ceil_div(shape.kv_len, kDistanceBlock) - 1;
  }

  // Return the number of groups of 64 rows, and of 16 keys, of a mask as bits.
  static int64_t mask_row_groups(int64_t rows) { return ceil_div(rows, 64); }
  static int64_t mask_key_groups(const Shape& shape) { return ceil_div(shape.kv_len, 16); }
  // Returns the number of blocks of keys that have sums in group_sums.
  static int64_t shared_key_blocks(const Shape& shape) {
    return shape.batch * shape.kv_heads * ceil_div(shape.kv_len, kSplitKeys);
  }
  int64_t counter_words(const Shape& shape) const {
    const int64_t sums = group_sums ? shared_key_blocks(shape) : int64_t{kSplitBlocks};
    return 1 + 2 * shape.batch * shape.heads + kMaxPersistentBlocks + 2 * kSplitConsumers * sums;
  }

  // Sets the pointers from `base` on, and returns the size in bytes. `base` may be null. `widest`
  // is the instance's head dim, which is at least head_dim and value_dim.
  static int64_t plan(const Shape& shape, int64_t widest, const BackwardFeatures& features,
                      void* base, BackwardWorkspace& workspace) {
    const bool deterministic = features.deterministic, is_float32 = features.is_float32;
    uint8_t* const start = static_cast<uint8_t*>(base);
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t at = offset;
      offset += align_part(bytes);
      return start + at;
    };
    const int64_t heads = shape.batch * shape.heads;
    const int multiple = shape.q_len > kOneTileRows ? kMaxBlockQ : 4;
    workspace.rows = static_cast<int32_t>(ceil_div(shape.q_len, multiple) * multiple);
    workspace.dquery_rows = static_cast<int32_t>(dquery_rows_of(int64_t{shape.q_len}));
    workspace.spans = {};
    if (features.segments) {
      workspace.spans = SegmentSpans::at(shape, take(SegmentSpans::bytes(shape)));
    } else if (features.mask_matrices > 0 && features.mask_rows == 1) {
      take(SegmentSpans::bytes(shape));  // for launch_backward(), which finds them at the start
    }
    workspace.padding = heads * workspace.rows;
    workspace.lse_log2 = reinterpret_cast<float*>(take((workspace.padding + kMaxBlockQ) * 4));
    workspace.delta = reinterpret_cast<float*>(take((workspace.padding + kMaxBlockQ) * 4));
    const int64_t dquery_bytes = heads * workspace.dquery_rows * shape.head_dim * 4;
    workspace.dquery = nullptr;
    if (!is_float32 && widest <= kMaxUndividedHeadDim) {  // above, kernels compute whole gradients
      workspace.dquery = reinterpret_cast<float*>(take(dquery_bytes));
    }
    workspace.odd_dquery = nullptr;
    workspace.flags = static_cast<int32_t>(2 * ceil_div(shape.q_len, 64));
    if (deterministic && widest <= kTwoSumsHeadDim && shape.q_len > kTwoSumsRows && !is_float32) {
      workspace.odd_dquery = reinterpret_cast<float*>(take(dquery_bytes));
      workspace.flags = static_cast<int32_t>(4 * ceil_div(shape.q_len, 128));
    }
    workspace.heads_of_key_block = jax_flash::heads_of_key_block(shape, widest, features);
    const bool shares = workspace.heads_of_key_block * shape.kv_heads < shape.heads;
    workspace.group_sums = nullptr;
    if (shares) {
      const int64_t bytes = shared_key_blocks(shape) * kSplitKeys * sum_columns(widest) * 4;
      workspace.group_sums = reinterpret_cast<float*>(take(bytes));
    }
    workspace.counters = reinterpret_cast<int32_t*>(take(workspace.counter_words(shape) * 4));
    workspace.split_sums = nullptr;
    workspace.split_sums_bytes = 0;
    if (!deterministic && may_divide_keys(shape, widest) && !is_float32) {
      const int64_t pairs = heads * ceil_div(shape.q_len, 64) * ceil_div(shape.kv_len, kSplitKeys);
      workspace.split_sums_bytes =
          std::min<int64_t>(kSplitBlocks, pairs) * kSplitKeys * sum_columns(widest) * 4;
      workspace.split_sums = reinterpret_cast<float*>(take(workspace.split_sums_bytes));
    }
    workspace.mask_words = nullptr;
    if (features.sm90 && !is_float32 && features.mask_matrices > 0 && widest <= kSplitHeadDim) {
      const int64_t groups = features.mask_matrices * mask_row_groups(features.mask_rows);
      workspace.mask_words =
          reinterpret_cast<uint32_t*>(take(groups * mask_key_groups(shape) * 128));
    }
    workspace.diagonals = nullptr;
    if (features.distances) {
      const int64_t bytes = heads * tile_diagonals(shape) * kDistanceSums * 4;
      workspace.diagonals = reinterpret_cast<float*>(take(bytes));
    }
    workspace.turns = nullptr;
    workspace.ticket = nullptr;
    if (deterministic) {
      workspace.turns = reinterpret_cast<int32_t*>(take((heads * workspace.flags + 1) * 4));
      workspace.ticket = workspace.turns + heads * workspace.flags;
    }
    return offset;
  }
};

}  // namespace jax_flash
