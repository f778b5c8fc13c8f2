// How the sm_90 decoding kernel divides its work, as far as shapes tell: plain C++, also for the
// size of the workspace.
//
// A unit is the query rows of one key/value head of one batch. Its keys are a row of tiles, and the
// units lie in a row, too, [batch, kv_heads]. Workers divide that row, either at the ends of units
// or anywhere, evenly by tiles; then what they computed of a unit is added up.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace jax_flash::sm90 {

inline constexpr int kDecodeRows = 64;              // of a unit, at most
inline constexpr int kDecodeSplitKeys = 256;        // a worker's part of a unit has more, as a rule
inline constexpr int kDecodeMultiprocessors = 132;  // that are used
inline constexpr int kDecodeMaxWorkers = 2 * kDecodeMultiprocessors;
// Workers that divide units look through the lengths of all batches first.
inline constexpr int64_t kDecodeMaxRaggedBatch = 2048;

inline int64_t decode_rows(const Shape& shape) {
  return shape.kv_heads == 0 ? 0 : int64_t{shape.heads / shape.kv_heads} * shape.q_len;
}

// Whether the kernel takes a call of this shape without modifiers. Tiles, of 32 keys or more, are
// counted in 32 bits.
inline bool takes_decode(const Shape& shape) {
  const int64_t rows = decode_rows(shape);
  return rows > 0 && rows <= kDecodeRows && shape.kv_len > 0 && shape.batch > 0 &&
         shape.batch * shape.kv_heads <= INT32_MAX &&
         shape.batch * shape.kv_heads * (shape.kv_len / 32 + 1) <= INT32_MAX;
}

inline int64_t decode_splits(const Shape& shape) {
  return (int64_t{shape.kv_len} + kDecodeSplitKeys - 1) / kDecodeSplitKeys;
}

// What workers leave behind for the units that they divide. Each has two places: for a unit that
// another worker began, and for one that it began and another one ends.
struct DecodeWorkspace {
  struct Ends {
    int32_t head, tail;  // units, or -1
  };

  float* out = nullptr;         // [workers, 2, rows, value_dim], not divided by the sums
  float* statistics = nullptr;  // [workers, 2, rows, 2]: reference in log2 units, sum
  Ends* ends = nullptr;         // [workers]

  static int64_t max_workers(const Shape& shape) {
    return std::min(int64_t{kDecodeMaxWorkers},
                    shape.batch * shape.kv_heads * decode_splits(shape));
  }
  static int64_t bytes(const Shape& shape) {
    if (!takes_decode(shape) || decode_splits(shape) == 1) return 0;
    const int64_t rows = 2 * max_workers(shape) * decode_rows(shape);
    return rows * (shape.value_dim + 2) * 4 + max_workers(shape) * int64_t{sizeof(Ends)};
  }
  static DecodeWorkspace at(const Shape& shape, void* workspace) {
    const int64_t rows = 2 * max_workers(shape) * decode_rows(shape);
    DecodeWorkspace result;
    result.out = static_cast<float*>(workspace);
    result.statistics = result.out + rows * shape.value_dim;
    result.ends = reinterpret_cast<Ends*>(result.statistics + rows * 2);
    return result;
  }
};

struct DecodePlan {
  int32_t workers, units;
  bool whole_units;  // workers divide none
  bool ragged;       // batches may differ in the keys that they attend to

  // `max_workers`: as many run at once. `ragged`: some operand may make batches differ.
  static DecodePlan make(const Shape& shape, int64_t max_workers, bool ragged) {
    DecodePlan plan;
    const int64_t units = shape.batch * shape.kv_heads;
    const int64_t rounds = (units + max_workers - 1) / max_workers;
    plan.units = static_cast<int32_t>(units);
    plan.ragged = ragged;
    plan.whole_units = decode_splits(shape) == 1 || shape.batch > kDecodeMaxRaggedBatch ||
                       (!ragged && units * 10 >= rounds * max_workers * 9);
    plan.workers = static_cast<int32_t>(plan.whole_units
                                            ? (units + rounds - 1) / rounds
                                            : std::min(max_workers, units * decode_splits(shape)));
    return plan;
  }
};

}  // namespace jax_flash::sm90
