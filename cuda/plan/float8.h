// Describes the scales and the workspace of a forward call of float8 operands.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/segment_spans.h"

namespace jax_flash {

// Holds the float32 scales of float8 operands. The value of an element is the stored number times
// its scale. Along `row` there is a scale for each kScaleBlock tokens, or one for all.
struct Scales {
  Operand query;  // [batch, N, blocks of T]
  Operand key;    // [batch, K, blocks of S]
  Operand value;  // [batch, K, blocks of S]
};
inline constexpr int kScaleBlock = 128;

namespace sm90 {

// Holds factors that depend on the scales of a tile of kScaleBlock keys and values.
struct KeyFactors {
  float key;         // the scale of the keys
  float value_log2;  // log2 of the scale of the values over the greatest such scale of the head
  float value_rest;  // 2^-value_log2
  float greatest;    // that greatest scale
};

// Lays out the workspace: the spans of segments, if there are any; tiles of transposed values;
// KeyFactors; a counter. Each batch entry, head and key tile has a tile of values and
// KeyFactors. FP8 products need values that are contiguous along the keys, so a tile of values has
// value_dim rows of kScaleBlock bytes.
struct Float8Workspace {
  uint8_t* values = nullptr;
  KeyFactors* factors = nullptr;
  int32_t* counter = nullptr;  // of query tiles that blocks have taken; 0 when values are complete
  int32_t tiles = 0;

  static int32_t tiles_of(const Shape& shape) {
    return static_cast<int32_t>(ceil_div(shape.kv_len, kScaleBlock));
  }
  static int64_t spans_bytes(const Shape& shape, bool segments) {
    return segments ? align_part(SegmentSpans::bytes(shape)) : 0;
  }
  static int64_t bytes(const Shape& shape, bool segments) {
    const int64_t count = shape.batch * shape.kv_heads * tiles_of(shape);
    const int64_t of_tile =
        int64_t{shape.value_dim} * kScaleBlock + static_cast<int64_t>(sizeof(KeyFactors));
    return spans_bytes(shape, segments) + count * of_tile + static_cast<int64_t>(sizeof(int32_t));
  }
  static Float8Workspace at(const Shape& shape, bool segments, void* workspace) {
    Float8Workspace result;
    result.tiles = tiles_of(shape);
    result.values = static_cast<uint8_t*>(workspace) + spans_bytes(shape, segments);
    const int64_t count = shape.batch * shape.kv_heads * result.tiles;
    result.factors =
        reinterpret_cast<KeyFactors*>(result.values + count * shape.value_dim * kScaleBlock);
    result.counter = reinterpret_cast<int32_t*>(result.factors + count);
    return result;
  }
};

}  // namespace sm90
}  // namespace jax_flash
