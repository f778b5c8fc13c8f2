// Lays out the spans of segment ids, and copies of the ids. A span is the smallest and the largest
// id of kSegmentBlock queries or keys. A kernel computes them before the attention kernel, which
// then skips pairs of tiles whose spans do not overlap. In packed sequences, whose ids do not
// decrease, no other pairs of tiles could be skipped. In others, a pair without a common id may
// still be computed.
//
// A mask that all queries and heads share, such as that of a padded batch, is read as segments by
// kernels that take segments but no masks: all queries and the allowed keys are of segment 1, and
// the other keys of segment 0 (SegmentSpans::as_segments()).
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/divisor.h"

namespace jax_flash {

inline constexpr int kSegmentBlock = 32;

struct SegmentSpan {
  int32_t least, greatest;

  JAX_FLASH_HOST_DEVICE bool meets(const SegmentSpan& other) const {
    return least <= other.greatest && other.least <= greatest;
  }
};

// The number of a batch's spans is a multiple of this, so that they can be read two at a time.
// Spans beyond the last id contain no id.
inline constexpr int kSpansAligned = 4;

// Describes the part of the workspace for segments: the spans of the T query ids of every batch
// entry, those of the S key ids, a counter, and copies of the ids, kSegmentBlock for each span.
// Blocks take units of work by the counter, which is 0 when the spans have been computed.
struct SegmentSpans {
  SegmentSpan* query = nullptr;
  SegmentSpan* key = nullptr;
  int32_t* counter = nullptr;
  int32_t* query_ids = nullptr;  // contiguous and aligned, even if the operand is not
  int32_t* key_ids = nullptr;
  int32_t query_blocks = 0, key_blocks = 0;

  static int32_t blocks(int32_t length) {
    constexpr int kIds = kSegmentBlock * kSpansAligned;
    return static_cast<int32_t>(ceil_div(length, kIds)) * kSpansAligned;
  }
  static constexpr int64_t kCounters = 2;  // in units of a span, which keep the ids aligned
  static int64_t bytes(const Shape& shape) {
    const int64_t spans = shape.batch * (int64_t{blocks(shape.q_len)} + blocks(shape.kv_len));
    return (spans + kCounters) * static_cast<int64_t>(sizeof(SegmentSpan)) +
           spans * kSegmentBlock * static_cast<int64_t>(sizeof(int32_t));
  }
  static SegmentSpans at(const Shape& shape, void* workspace) {
    SegmentSpans spans;
    spans.query_blocks = blocks(shape.q_len);
    spans.key_blocks = blocks(shape.kv_len);
    spans.query = static_cast<SegmentSpan*>(workspace);
    spans.key = spans.query + shape.batch * spans.query_blocks;
    spans.counter = reinterpret_cast<int32_t*>(spans.key + shape.batch * spans.key_blocks);
    spans.query_ids = spans.counter + 2 * kCounters;
    spans.key_ids = spans.query_ids + shape.batch * spans.query_blocks * kSegmentBlock;
    return spans;
  }

  // Returns the call with segments in place of its mask. Their ids are the copies that the kernel
  // for these spans makes: a kernel that begins while that one runs must wait before it reads them.
  template <typename Params>
  Params as_segments(Params params) const {
    const Shape& shape = params.shape;
    const auto ids = [&](int32_t* data, int32_t blocks) {
      Operand operand;
      operand.data = data;
      operand.row = 1;
      int64_t stride = int64_t{blocks} * kSegmentBlock;
      for (int axis = shape.num_batch_dims; axis-- > 0; stride *= shape.batch_dims[axis]) {
        operand.batch[axis] = stride;
      }
      return operand;
    };
    params.query_segment_ids = ids(query_ids, query_blocks);
    params.key_value_segment_ids = ids(key_ids, key_blocks);
    params.mask = {};
    return params;
  }
};

}  // namespace jax_flash
