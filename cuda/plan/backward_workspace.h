// What the backward kernels keep in device memory between them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/segment_spans.h"

namespace jax_flash {

inline constexpr int kMaxBlockQ = 128;  // a multiple of every kBlockQ

// Up to so many query rows a tile of the sm_90 kernels is its head's only one.
inline constexpr int kOneTileRows = 64;

// Up to this head dim, and from more queries than this on: sm90/backward/config.cuh.
inline constexpr int kTwoSumsHeadDim = 64, kTwoSumsRows = 128;

inline constexpr int kMaxPersistentBlocks = 256;  // that have a counter of their own

// Where thread blocks divide blocks of keys: sm90/backward/split.cuh. There are no more than so
// many of them, and up to this head dim.
inline constexpr int kSplitBlocks = 132, kSplitKeys = 128, kSplitHeadDim = 128;

// For how many rows a head's sums for dquery have room. Lane l of a warp has elements of rows l / 4
// and l / 4 + 8 of 16, side by side: of up to 8 last rows it keeps the place of 8 more.
template <typename Integer>
JAX_FLASH_HOST_DEVICE constexpr Integer dquery_rows_of(Integer rows) {
  const Integer rest = rows % 16;
  return rows - rest + (rest < 8 ? rest : 8) * 2;
}

// Lanes that hold accumulators of a tile's first `rows` rows: its first ones.
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

struct BackwardWorkspace {
  SegmentSpans spans;  // pointers are null without segment ids
  // [batch, N, rows]: lse / ln 2, +inf for rows that attend to nothing and for those beyond T; and
  // sum(dout * out) - dlse, zero there. A head has whole tiles of rows, for copies of these; up to
  // kOneTileRows, where they could take more memory than dquery, a multiple of 4, for copies of 16
  // bytes. Behind the last head's, from index `padding` on, are kMaxBlockQ more as of rows beyond
  // T.
  float* lse_log2;
  float* delta;
  int64_t padding;
  // [batch, N, dquery_rows, head dim]: dquery / scale. Elements of a tile lie in the order of
  // accumulators' fragments, without lanes and columns that are none of dquery's. On sm_90, 64
  // rows: [block of 8 columns][lane][element]; on sm_80, kBlockQ rows: see DqueryOrder.
  float* dquery;
  // A second sum, where deterministic runs have two, of blocks of even and of odd key tiles: or
  // null.
  float* odd_dquery;
  // [batch, N, flags], of which the first count the blocks that have added to a query tile; then
  // one ticket. For deterministic runs.
  int32_t* turns;
  int32_t* ticket;
  // Of the persistent blocks of sm_90: see sm90/backward/plan.cuh.
  int32_t* counters;
  // dK and dV of parts of blocks of keys: [at most kSplitBlocks, kSplitKeys, 2, head dim of the
  // instance] in fragment order, or null. With a mask: sm90/backward/mask.cuh.
  float* split_sums;
  int64_t split_sums_bytes;
  int32_t rows, dquery_rows, flags;  // of a head

  // Where a row's lse_log2 and delta are.
  JAX_FLASH_HOST_DEVICE int64_t row_index(int64_t batch_head, int32_t row) const {
    return row < rows ? batch_head * rows + row : padding;
  }

  static int64_t tiles(int64_t length, int64_t size) { return (length + size - 1) / size; }
  static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  // At least as many: whoever asks for the size does not know how many heads of keys there are.
  static int64_t counter_words(const Shape& shape) {
    return 1 + 2 * shape.batch * shape.heads + kMaxPersistentBlocks + 2 * kSplitBlocks;
  }

  // Sets the pointers from `base` and returns the size in bytes; base may be null. `widest` is the
  // instance's head dim, at least both.
  static int64_t plan(const Shape& shape, int64_t widest, bool segments, bool deterministic,
                      void* base, BackwardWorkspace& workspace) {
    uint8_t* const start = static_cast<uint8_t*>(base);
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t at = offset;
      offset += aligned(bytes);
      return start + at;
    };
    const int64_t heads = shape.batch * shape.heads;
    const int multiple = shape.q_len > kOneTileRows ? kMaxBlockQ : 4;
    workspace.rows = static_cast<int32_t>(tiles(shape.q_len, multiple) * multiple);
    workspace.dquery_rows = static_cast<int32_t>(dquery_rows_of(int64_t{shape.q_len}));
    workspace.spans = {};
    if (segments) {
      workspace.spans = SegmentSpans::at(shape, take(SegmentSpans::bytes(shape)));
    }
    workspace.padding = heads * workspace.rows;
    workspace.lse_log2 = reinterpret_cast<float*>(take((workspace.padding + kMaxBlockQ) * 4));
    workspace.delta = reinterpret_cast<float*>(take((workspace.padding + kMaxBlockQ) * 4));
    const int64_t dquery_bytes = heads * workspace.dquery_rows * shape.head_dim * 4;
    workspace.dquery = reinterpret_cast<float*>(take(dquery_bytes));
    workspace.odd_dquery = nullptr;
    workspace.flags = static_cast<int32_t>(2 * tiles(shape.q_len, 64));
    if (deterministic && widest <= kTwoSumsHeadDim && shape.q_len > kTwoSumsRows) {
      workspace.odd_dquery = reinterpret_cast<float*>(take(dquery_bytes));
      workspace.flags = static_cast<int32_t>(4 * tiles(shape.q_len, 128));
    }
    workspace.counters = reinterpret_cast<int32_t*>(take(counter_words(shape) * 4));
    workspace.split_sums = nullptr;
    workspace.split_sums_bytes = 0;
    if (!deterministic && widest <= kSplitHeadDim) {
      const int64_t pairs = heads * tiles(shape.q_len, 64) * tiles(shape.kv_len, kSplitKeys);
      workspace.split_sums_bytes =
          std::min<int64_t>(kSplitBlocks, pairs) * kSplitKeys * 2 * widest * 4;
      workspace.split_sums = reinterpret_cast<float*>(take(workspace.split_sums_bytes));
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
