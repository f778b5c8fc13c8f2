// Computes segment spans on the device, and skips tiles by means of them.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/segment_spans.h"
#include "ptx/griddepcontrol.cuh"
#include "tile/batch_index.cuh"

namespace jax_flash {

// Returns the span of tile `tile` of kBlock rows, at least one of which exists, from the `blocks`
// spans of one batch. With kAtOnce, no read waits for another, which takes registers, and two spans
// are read at a time if the tile allows it (kSpansAligned).
template <int kBlock, bool kAtOnce = false>
__device__ __forceinline__ SegmentSpan tile_span(const SegmentSpan* spans, int32_t blocks,
                                                 int64_t tile) {
  static_assert(kBlock % kSegmentBlock == 0);
  constexpr int kRatio = kBlock / kSegmentBlock;
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
// whole warps: the lanes look at 32 tiles at a time.
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

// Threads per block of the kernel below. They are many, so that few multiprocessors have a block of
// it: on the others the next kernel, which takes all of their registers, begins meanwhile.
inline constexpr int kSegmentSpansThreads = 1024;

// Computes the spans. Grid: one warp per span of query or key ids.
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
  const Operand& ids = is_query ? params.query_segment_ids : params.key_value_segment_ids;
  const int64_t row = index % blocks * kSegmentBlock + threadIdx.x % 32;
  const int32_t* ids_gmem = BatchIndex(params.shape, index / blocks).pointer<const int32_t>(ids);
  const bool valid = row < length;
  const int32_t id = valid ? ids_gmem[row * ids.row] : 0;
  const SegmentSpan span = {__reduce_min_sync(0xffffffff, valid ? id : INT32_MAX),
                            __reduce_max_sync(0xffffffff, valid ? id : INT32_MIN)};
  if (threadIdx.x % 32 == 0) (is_query ? spans.query : spans.key)[index] = span;
}

}  // namespace jax_flash
