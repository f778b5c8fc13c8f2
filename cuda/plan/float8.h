// Describes what a call of float8 operands has besides Forward, and its workspace.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/segment_spans.h"

namespace jax_flash {

// Holds the scales of float8 operands, float32: an operand is the stored number times its scale.
// Along `row` there is one for each kScaleBlock tokens, or one for all.
struct Scales {
  Operand query;  // [batch, N, blocks of T]
  Operand key;    // [batch, K, blocks of S]
  Operand value;  // [batch, K, blocks of S]
};
inline constexpr int kScaleBlock = 128;

namespace sm90 {

// Holds what the keys of a tile, kScaleBlock of them, have in common.
struct KeyFactors {
  float key;         // their scale
  float value_log2;  // log2 of the values' scale over the greatest of the head
  float value_rest;  // 2^-value_log2
  float greatest;    // that greatest scale
};

// Lays out values as FP8 products need them, keys contiguous, and KeyFactors: for each batch, head
// and tile of keys. A tile of values has value_dim rows of kScaleBlock bytes. It follows the spans
// of segments, if there are any.
struct Float8Workspace {
  uint8_t* values = nullptr;
  KeyFactors* factors = nullptr;
  int32_t* counter = nullptr;  // of query tiles that were taken in turn; 0 when values are there
  int32_t tiles = 0;

  static int32_t tiles_of(const Shape& shape) {
    return shape.kv_len / kScaleBlock + (shape.kv_len % kScaleBlock != 0);
  }
  static int64_t align(int64_t bytes) { return (bytes + 255) / 256 * 256; }
  static int64_t spans_bytes(const Shape& shape, bool segments) {
    return segments ? align(SegmentSpans::bytes(shape)) : 0;
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
