// Handles segments on the device: computes the spans of segment ids (least and greatest id of a
// block of rows), skips tiles whose spans do not meet, and forbids pairs of different segments in
// accumulator fragments.
#pragma once

#include <cstdint>

#include "modifiers/mask.cuh"
#include "modifiers/pairs.cuh"
#include "params.h"
#include "plan/segment_spans.h"
#include "ptx/griddepcontrol.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash {

// Returns the span of tile `tile` of kBlock rows from the `blocks` spans of one batch. At least one
// row of the tile must exist. kAtOnce: no read waits for another, which takes registers, and two
// spans are read at a time if the tile allows it (kSpansAligned).
template <int kBlock, bool kAtOnce = false>
__device__ __forceinline__ SegmentSpan tile_span(const SegmentSpan* spans, int32_t blocks,
                                                 int64_t tile) {
  if constexpr (kBlock < kSegmentBlock) {  // the tile is part of one span
    static_assert(kSegmentBlock % kBlock == 0);
    return tile_span<kSegmentBlock>(spans, blocks, tile / (kSegmentBlock / kBlock));
  }
  constexpr int kRatio = kBlock < kSegmentBlock ? 1 : kBlock / kSegmentBlock;
  static_assert(kBlock % kSegmentBlock == 0 || kBlock < kSegmentBlock);
  SegmentSpan span = {INT32_MAX, INT32_MIN};
  const auto add = [&](const SegmentSpan& part) {
    span.least = min(span.least, part.least);
    span.greatest = max(span.greatest, part.greatest);
  };
  if constexpr (kAtOnce && kRatio % 2 == 0 && kSpansAligned % kRatio == 0) {
    const int32_t index = min(static_cast<int32_t>(tile) * kRatio, blocks - kRatio);
#pragma unroll
    for (int i = 0; i < kRatio; i += 2) {
      const int4 parts = *reinterpret_cast<const int4*>(spans + index + i);
      add({parts.x, parts.y});
      add({parts.z, parts.w});
    }
  } else if constexpr (kAtOnce) {
#pragma unroll
    for (int i = 0; i < kRatio; ++i) {
      const int32_t index = min(static_cast<int32_t>(tile) * kRatio + i, blocks - 1);
      const int2 part = *reinterpret_cast<const int2*>(spans + index);
      add({part.x, part.y});
    }
  } else {
    for (int64_t i = tile * kRatio; i < (tile + 1) * kRatio && i < blocks; ++i) add(spans[i]);
  }
  return span;
}

// Returns the first tile of [tile, end) of kBlock rows whose span meets `span`, or `end`. Called by
// whole warps: each lane tests one of 32 tiles.
template <int kBlock>
__device__ __forceinline__ int32_t next_tile(const SegmentSpan* spans, int32_t blocks,
                                             const SegmentSpan& span, int32_t tile, int32_t end) {
  for (; tile < end; tile += 32) {
    const int32_t mine = tile + static_cast<int32_t>(threadIdx.x % 32);
    const bool meets = mine < end && span.meets(tile_span<kBlock>(spans, blocks, mine));
    const uint32_t votes = __ballot_sync(0xffffffff, meets);
    if (votes) return tile + __ffs(votes) - 1;
  }
  return end;
}

// Threads per block of the kernel below. Large blocks occupy few multiprocessors. On the others,
// the next kernel, which takes all of their registers, begins meanwhile.
inline constexpr int kSegmentSpansThreads = 1024;

// Computes the spans, and copies the ids. The grid has one warp per span of query or key ids. A
// call without segments has ids by its mask of keys.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    segment_spans_kernel(const __grid_constant__ Forward params, SegmentSpans spans) {
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
#endif
  if (blockIdx.x == 0 && threadIdx.x == 0) *spans.counter = 0;
  const int64_t total_query = params.shape.batch * spans.query_blocks;
  int64_t index = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const bool is_query = index < total_query;
  if (!is_query) index -= total_query;
  const int32_t blocks = is_query ? spans.query_blocks : spans.key_blocks;
  if (blocks == 0 || index >= params.shape.batch * blocks) return;
  const int32_t length = is_query ? params.shape.q_len : params.shape.kv_len;
  const int64_t row = index % blocks * kSegmentBlock + threadIdx.x % 32;
  const BatchIndex batch(params.shape, index / blocks);
  const bool valid = row < length;
  int32_t id = 0;
  if (params.query_segment_ids) {
    const Operand& ids = is_query ? params.query_segment_ids : params.key_value_segment_ids;
    if (valid) id = batch.pointer<const int32_t>(ids)[row * ids.row];
  } else {
    const Operand& mask = params.mask;
    id = is_query || (valid && batch.pointer<const uint8_t>(mask)[row * mask.col] != 0) ? 1 : 0;
  }
  const SegmentSpan span = {__reduce_min_sync(0xffffffff, valid ? id : INT32_MAX),
                            __reduce_max_sync(0xffffffff, valid ? id : INT32_MIN)};
  if (threadIdx.x % 32 == 0) (is_query ? spans.query : spans.key)[index] = span;
  (is_query ? spans.query_ids : spans.key_ids)[index * kSegmentBlock + threadIdx.x % 32] = id;
}

// Sets pairs of different segments to -inf. The ids of one batch begin at the offsets.
template <int kInFlight, int kN>
__device__ __forceinline__ void apply_segments(float (&scores)[1][kN][4], const Forward& params,
                                               int64_t query_offset, int64_t key_offset,
                                               int32_t row0, int32_t col0, const Extent& extent) {
  const auto* query_ids = static_cast<const int32_t*>(params.query_segment_ids.data) + query_offset;
  const auto* key_ids = static_cast<const int32_t*>(params.key_value_segment_ids.data) + key_offset;
  int32_t ids[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = min(row0 + fragment_row(0, 2 * half), extent.rows - 1);
    ids[half] = query_ids[row * params.query_segment_ids.row];
  }
  for_pairs<int32_t, kInFlight, kN>(key_ids, 0, params.key_value_segment_ids.row, row0, col0,
                                    extent, [&](int n, int half, int32_t first, int32_t second) {
                                      if (first != ids[half])
                                        scores[0][n][2 * half] = minus_infinity();
                                      if (second != ids[half])
                                        scores[0][n][2 * half + 1] = minus_infinity();
                                    });
}

// Does the same for fragments of S^T, whose rows are keys and whose columns are queries, given the
// ids of one batch.
template <int kN>
__device__ __forceinline__ void apply_segments_transposed(float (&scores)[kN][4],
                                                          const Forward& params,
                                                          const int32_t* query_ids,
                                                          const int32_t* key_ids, int32_t key0,
                                                          int32_t row0, const Extent& extent) {
  int32_t ids[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t key = min(key0 + fragment_row(0, 2 * half), extent.rows - 1);
    ids[half] = key_ids[key * params.key_value_segment_ids.row];
  }
  for_pairs<int32_t, 4, kN>(query_ids, 0, params.query_segment_ids.row, key0, row0, extent,
                            [&](int n, int half, int32_t a, int32_t b) {
                              forbid_pair(scores, n, half, a != ids[half], b != ids[half]);
                            });
}

// Does the same for fragments of S^T, given copies of the ids (SegmentSpans): `query_ids` points to
// the copy for query row0, `ids` holds the ids of the thread's two keys.
template <int kN>
__device__ __forceinline__ void separate_transposed(float (&scores)[kN][4],
                                                    const int32_t* query_ids,
                                                    const int32_t (&ids)[2]) {
  const int2* pairs = reinterpret_cast<const int2*>(query_ids + fragment_col(0, 0));
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const int2 of_rows = pairs[n * 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (of_rows.x != ids[half]) scores[n][2 * half] = minus_infinity();
      if (of_rows.y != ids[half]) scores[n][2 * half + 1] = minus_infinity();
    }
  }
}

}  // namespace jax_flash
