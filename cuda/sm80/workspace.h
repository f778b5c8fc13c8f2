// What the backward kernels keep in device memory between them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "tile/segment_spans.h"

namespace jax_flash::sm80 {

inline constexpr int kRowPadding = 128;  // a multiple of every kBlockQ

inline constexpr int kTwoSumsHeadDim = 64;  // up to this: sm90/backward_config.cuh

inline constexpr int kMaxPersistentBlocks = 256;  // that have a counter of their own

// Where thread blocks divide blocks of keys: sm90/backward_split.cuh. There are no more than so
// many of them, and up to this head dim.
inline constexpr int kSplitBlocks = 132, kSplitKeys = 128, kSplitHeadDim = 128;

struct BackwardWorkspace {
  SegmentSpans spans;  // pointers are null without segment ids
  // [batch, N, rows], rows being T rounded up to kRowPadding: lse / ln 2, +inf for rows that
  // attend to nothing and for padding; and sum(dout * out) - dlse, zero there.
  float* lse_log2;
  float* delta;
  // [batch, N, rows, head dim of the instance]: dquery / scale. Within a tile of kBlockQ rows
  // elements lie in the order of the accumulators' fragments: see DqueryOrder.
  float* dquery;
  // A second sum, where deterministic runs have two, of blocks of even and of odd key tiles: or
  // null.
  float* odd_dquery;
  // [batch, N, rows / 32], of which the first rows / kBlockQ count the blocks that have added to
  // a query tile; then one ticket. For deterministic runs.
  int32_t* turns;
  int32_t* ticket;
  // Of the persistent blocks of sm_90: see sm90/backward_plan.cuh.
  int32_t* counters;
  // dK and dV of parts of blocks of keys: [at most kSplitBlocks, kSplitKeys, 2, head dim of the
  // instance] in fragment order, or null. With a mask: sm90/backward_mask.cuh.
  float* split_sums;
  int64_t split_sums_bytes;
  int32_t rows;

  static int64_t padded_rows(const Shape& shape) {
    return (int64_t{shape.q_len} + kRowPadding - 1) / kRowPadding * kRowPadding;
  }
  static int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

  // At least as many: whoever asks for the size does not know how many heads of keys there are.
  static int64_t counter_words(const Shape& shape) {
    return 1 + 2 * shape.batch * shape.heads + kMaxPersistentBlocks + 2 * kSplitBlocks;
  }

  // Sets the pointers from `base` and returns the size in bytes; base may be null. `head_dim` is
  // the instance's, at least both head dims.
  static int64_t plan(const Shape& shape, int64_t head_dim, bool segments, bool deterministic,
                      void* base, BackwardWorkspace& workspace) {
    uint8_t* const start = static_cast<uint8_t*>(base);
    int64_t offset = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t at = offset;
      offset += aligned(bytes);
      return start + at;
    };
    const int64_t rows = padded_rows(shape);
    const int64_t total_rows = shape.batch * shape.heads * rows;
    workspace.rows = static_cast<int32_t>(rows);
    workspace.spans = {};
    if (segments) {
      workspace.spans = SegmentSpans::at(shape, take(SegmentSpans::bytes(shape)));
    }
    workspace.lse_log2 = reinterpret_cast<float*>(take(total_rows * 4));
    workspace.delta = reinterpret_cast<float*>(take(total_rows * 4));
    workspace.dquery = reinterpret_cast<float*>(take(total_rows * head_dim * 4));
    workspace.odd_dquery = nullptr;
    if (deterministic && head_dim <= kTwoSumsHeadDim) {
      workspace.odd_dquery = reinterpret_cast<float*>(take(total_rows * head_dim * 4));
    }
    workspace.counters = reinterpret_cast<int32_t*>(take(counter_words(shape) * 4));
    workspace.split_sums = nullptr;
    workspace.split_sums_bytes = 0;
    if (!deterministic && head_dim <= kSplitHeadDim) {
      const int64_t key_tiles = (int64_t{shape.kv_len} + kSplitKeys - 1) / kSplitKeys;
      const int64_t parts = std::min<int64_t>(kSplitBlocks, total_rows / 64 * key_tiles);
      workspace.split_sums_bytes = parts * kSplitKeys * 2 * head_dim * 4;
      workspace.split_sums = reinterpret_cast<float*>(take(workspace.split_sums_bytes));
    }
    workspace.turns = nullptr;
    workspace.ticket = nullptr;
    if (deterministic && rows > 0) {  // without rows nothing is summed, and nothing sets the ticket
      workspace.turns = reinterpret_cast<int32_t*>(take((total_rows / 32 + 1) * 4));
      workspace.ticket = workspace.turns + total_rows / 32;
    }
    return offset;
  }
};

}  // namespace jax_flash::sm80
