// Divides the work of the sm_80 family's decoding kernel, as far as shapes determine it. This is
// plain C++, because the size of the workspace depends on it, too.
//
// A unit is up to 16 query rows of the heads that share a key/value head, in one batch entry. Its
// rows are ordered as [queries, heads of the group]. If there are few units, blocks divide the keys
// of each into parts, and a second kernel combines the partial results.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/choice.h"
#include "plan/divisor.h"

namespace jax_flash::sm80 {

inline constexpr int kDecodeRows = 16;         // the most rows of a unit
inline constexpr int kDecodeMaxHeadDim = 256;  // of query and value
inline constexpr int kDecodeMaxBlocks = 2048;  // the most blocks of a call that divides units

// Return the warps of a block, and the keys that a warp takes of a tile, for an instance's head
// dim. A warp keeps sums of all columns in registers, so wider instances have fewer warps.
constexpr int decode_warps(int head_dim) { return head_dim <= 128 ? 4 : 2; }
constexpr int decode_warp_keys(int head_dim, bool float8) {
  return float8 && head_dim <= 128 ? 32 : 16;
}

// Returns the fewest keys of a part. Reading and computing that many takes about as long as
// starting a block.
constexpr int decode_part_keys(DType dtype) { return dtype == DType::kFloat32 ? 64 : 128; }

struct DecodeUnits {
  int32_t group = 0;   // query heads for each key/value head
  int64_t chunks = 0;  // units of a key/value head
  int64_t count = 0;   // units of the call

  explicit DecodeUnits(const Shape& shape) {
    if (shape.kv_heads == 0) return;
    group = shape.heads / shape.kv_heads;
    chunks = ceil_div(int64_t{group} * shape.q_len, kDecodeRows);
    count = shape.batch * shape.kv_heads * chunks;
  }
};

// Returns whether decoding is faster than the forward kernel, which computes tiles of 64 or more
// rows of one head: if there are no more units than such tiles, or if the tiles leave most
// multiprocessors idle. The forward kernel of float8 is faster, so there must be fewer tiles then.
inline bool takes_decode(const Shape& shape, DType dtype) {
  if (std::max(shape.head_dim, shape.value_dim) > kDecodeMaxHeadDim) return false;
  const int64_t units = DecodeUnits(shape).count, tiles = query_tiles(shape, 64);
  return units > 0 && units <= INT32_MAX &&
         (units <= tiles || (tiles <= (dtype == DType::kFloat8 ? 16 : 32) && shape.kv_len >= 512));
}

// Returns the number of parts for which `units` units take the least time, if `blocks` blocks run
// at once. A round of blocks takes as long as a part's keys and `start` more, and the second kernel
// as long as `start` more in each round.
inline int32_t decode_parts(int64_t units, int64_t blocks, int64_t kv_len, int64_t most,
                            int64_t start) {
  int64_t best = 1, least = ceil_div(units, blocks) * (kv_len + start), parts = 1;
  for (int64_t rounds = ceil_div(2 * units, blocks); parts < most; ++rounds) {
    parts = std::min(rounds * blocks / units, most);  // as many as these rounds take
    const int64_t keys = ceil_div(kv_len, parts), time = rounds * (keys + 2 * start);
    if (time < least) {
      least = time;
      best = ceil_div(kv_len, keys);  // the fewest that have as many keys
    }
  }
  return static_cast<int32_t>(best);
}

// Describes the partial results of units whose keys blocks divide.
struct DecodeParts {
  float* values = nullptr;      // [units, parts, kDecodeRows, pitch]: sums of P V
  float* statistics = nullptr;  // [units, parts, kDecodeRows, 2]: running maximum, sum of P
  // Counts to divide by: units of the call, chunks of a key/value head, parts of a unit, query
  // heads of a group, key/value heads.
  PlainDivisor units, chunks, parts, group, kv_heads;
  int32_t pitch = 0;

  // `blocks`: the number of blocks that run at once.
  static DecodeParts at(const Shape& shape, DType dtype, int64_t blocks, void* workspace) {
    const DecodeUnits units(shape);
    DecodeParts result;
    result.units = PlainDivisor(static_cast<int32_t>(units.count));
    result.chunks = PlainDivisor(static_cast<int32_t>(units.chunks));
    result.parts = PlainDivisor(decode_parts(units.count, blocks, shape.kv_len,
                                             most_parts(shape, dtype), decode_part_keys(dtype)));
    result.group = PlainDivisor(units.group);
    result.kv_heads = PlainDivisor(shape.kv_heads);
    result.pitch = pitch_of(shape);
    result.values = static_cast<float*>(workspace);
    result.statistics =
        result.values + units.count * result.parts.divisor * kDecodeRows * result.pitch;
    return result;
  }
  // Divides the backward pass of a call that has_one_row() of float32 in the same way. `values` is
  // [units, parts, pitch] then: dq.
  static DecodeParts of_gradient(const Shape& shape, int64_t blocks, void* workspace) {
    DecodeParts result = at(shape, DType::kFloat32, blocks, workspace);
    result.statistics = nullptr;
    result.pitch = gradient_pitch_of(shape);
    return result;
  }
  static int64_t gradient_bytes(const Shape& shape) {
    if (!has_one_row(shape) || !takes_decode(shape, DType::kFloat32)) return 0;
    return DecodeUnits(shape).count * most_parts(shape, DType::kFloat32) *
           gradient_pitch_of(shape) * 4;
  }
  // Returns how many blocks the decoding kernel has.
  int64_t blocks() const { return int64_t{units.divisor} * parts.divisor; }
  // Returns the bytes of the workspace, enough for any number of blocks.
  static int64_t bytes(const Shape& shape, DType dtype) {
    if (!takes_decode(shape, dtype) || most_parts(shape, dtype) == 1) return 0;
    return DecodeUnits(shape).count * most_parts(shape, dtype) * kDecodeRows *
           (pitch_of(shape) + 2) * 4;
  }

 private:
  static int32_t pitch_of(const Shape& shape) { return (shape.value_dim + 3) / 4 * 4; }
  static int32_t gradient_pitch_of(const Shape& shape) { return (shape.head_dim + 3) / 4 * 4; }
  static int64_t most_parts(const Shape& shape, DType dtype) {
    const int64_t units = std::max(DecodeUnits(shape).count, int64_t{1});
    return std::clamp(kDecodeMaxBlocks / units, int64_t{1},
                      std::max(ceil_div(shape.kv_len, decode_part_keys(dtype)), int64_t{1}));
  }
};

}  // namespace jax_flash::sm80
