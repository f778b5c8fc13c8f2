// Divides the work of the sm_90 decoding kernel among workers, as far as shapes determine it. This
// is plain C++, because the size of the workspace depends on it, too.
//
// A unit is some consecutive queries of all heads that share a key/value head, in one batch entry,
// with the tiles of their keys. Few queries form one unit. The units are ordered as [batch,
// kv_heads, chunks of queries]. There are three ways to divide them among workers: whole units;
// each unit into the same number of parts; or evenly by tiles, anywhere. In the last two cases, a
// second kernel combines the partial results of a unit.
//
// Memory is read faster if the heads of a batch entry, whose rows are neighbours, are read at the
// same time. So if workers divide units anywhere, the tiles of each head and chunk, of all batch
// entries, form a sequence, and all sequences are divided in the same way. If that would leave too
// many workers idle, all tiles form one sequence.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/choice.h"
#include "plan/divisor.h"

namespace jax_flash::sm90 {

inline constexpr int kDecodeRows = 64;        // the most rows of a unit
inline constexpr int kDecodeSplitKeys = 256;  // a worker's part of a unit usually has more keys
inline constexpr int kDecodeMultiprocessors = 132;  // the most multiprocessors that are used
inline constexpr int kDecodeMaxWorkers = 2 * kDecodeMultiprocessors;
// With more batch entries, workers take whole units: to divide units of different lengths, each
// worker first reads the lengths of all batch entries.
inline constexpr int64_t kDecodeMaxRaggedBatch = 2048;

// Describes the units of a call. All chunks but the last have the same number of queries.
struct DecodeUnits {
  int64_t chunks = 0, queries = 0;  // of a batch entry; of a chunk
  int64_t rows = 0;                 // query rows of a unit, over all heads
  int64_t units = 0;                // 0: the decoding kernel cannot take the call

  explicit DecodeUnits(const Shape& shape) {
    const int64_t group = shape.kv_heads == 0 ? 0 : shape.heads / shape.kv_heads;
    if (group == 0 || group > kDecodeRows || shape.q_len == 0 || shape.kv_len == 0) return;
    chunks = ceil_div(shape.q_len, kDecodeRows / group);
    queries = ceil_div(shape.q_len, chunks);
    rows = group * queries;
    units = shape.batch * chunks * shape.kv_heads;
    // Tiles of at least 32 keys are counted in 32 bits.
    if (units > INT32_MAX || units * (shape.kv_len / 32 + 1) > INT32_MAX) units = 0;
  }
};

// Returns whether the decoding kernel takes a call of this shape, if it has no modifiers: if the
// queries form one chunk for each key/value head, or if it is faster than the kernels with tiles of
// 64 or 128 queries. All units of a batch entry read the same keys, so keys must be many more than
// queries. For some calls, choose_decode() prefers the sm_80 kernel. The figures are of an H200, at
// head dim 128: each key takes 80 ps for a unit, 58 or 95 ps for each of 132 tiles of a round, and
// the second kernel takes 12 us.
inline bool takes_decode(const Shape& shape) {
  const DecodeUnits units(shape);
  if (units.units == 0 || units.chunks == 1) return units.units > 0;
  if (shape.kv_len < 4 * int64_t{shape.q_len}) return false;
  const auto in_rounds = [&](int32_t rows) {
    return ceil_div(query_tiles(shape, rows), kDecodeMultiprocessors) * kDecodeMultiprocessors;
  };
  const int64_t saved = std::min(in_rounds(64) * 58, in_rounds(128) * 95) - units.units * 80;
  return saved * (shape.head_dim + shape.value_dim) / 256 > 12'000'000 / shape.kv_len;
}

inline int64_t decode_splits(const Shape& shape) {
  return ceil_div(shape.kv_len, kDecodeSplitKeys);
}

// Returns the pitch of a row in the workspace, in elements. It is the same for all head dims that
// an instance takes.
constexpr int64_t decode_pitch(int head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
}

// Describes the partial results of units that workers divide. Each worker has two places: one for a
// unit that an earlier worker began, and one for a unit that it begins and a later worker ends. The
// parts of a row are contiguous, at a pitch that an instance knows at compile time, so the kernel
// that combines them computes few addresses.
struct DecodeWorkspace {
  float* out = nullptr;         // [rows, workers, 2, decode_pitch()], not divided by the sums
  float* statistics = nullptr;  // [rows, workers, 2, 2]: running maximum in log2 units, sum
  int32_t places = 0;           // number of places of all workers

  static int64_t max_workers(const Shape& shape) {
    return std::min(int64_t{kDecodeMaxWorkers}, DecodeUnits(shape).units * decode_splits(shape));
  }
  static int64_t bytes(const Shape& shape) {
    if (!takes_decode(shape) || decode_splits(shape) == 1) return 0;
    const int64_t rows = 2 * max_workers(shape) * DecodeUnits(shape).rows;
    return rows * (pitch(shape) + 2) * 4;
  }
  static DecodeWorkspace at(const Shape& shape, void* workspace) {
    const int64_t rows = 2 * max_workers(shape) * DecodeUnits(shape).rows;
    DecodeWorkspace result;
    result.out = static_cast<float*>(workspace);
    result.statistics = result.out + rows * pitch(shape);
    result.places = static_cast<int32_t>(2 * max_workers(shape));
    return result;
  }

  // Returns the pitch of the instance that a library with all instances has for the shape.
  static int64_t pitch(const Shape& shape) {
    return decode_pitch(std::max(shape.head_dim, shape.value_dim));
  }
};

struct DecodePlan {
  int32_t workers, units;
  int32_t parts;      // the most parts of each unit; 0: workers divide units anywhere, or none
  int32_t sequences;  // that workers divide anywhere; 1 in the other cases
  bool whole_units;   // true if workers divide no units
  // True if units may differ in the keys that they attend to, and workers divide them anywhere.
  bool ragged;

  // `max_workers`: the number of workers that can run at once. `moves`: true if operands decide
  // which keys a batch entry attends to.
  static DecodePlan make(const Shape& shape, int64_t max_workers, bool moves) {
    DecodePlan plan;
    const DecodeUnits all(shape);
    const int64_t units = all.units, splits = decode_splits(shape);
    const int64_t rounds = ceil_div(units, max_workers);
    const int64_t parts = std::min(max_workers / units, splits);
    const bool differ = moves && shape.batch > 1;
    plan.units = static_cast<int32_t>(units);
    plan.whole_units = splits == 1 || shape.batch > kDecodeMaxRaggedBatch ||
                       (!differ && units * 10 >= rounds * max_workers * 9);
    // With the same number of parts for each unit, the heads of a batch entry are read at the same
    // time, and no worker handles two units.
    const bool alike =
        !plan.whole_units && !differ && (parts == splits || parts * units * 10 >= max_workers * 9);
    plan.parts = static_cast<int32_t>(alike ? parts : 0);
    plan.ragged = differ || (moves && !alike && !plan.whole_units);
    plan.sequences = 1;
    if (plan.whole_units) {
      plan.workers = static_cast<int32_t>(ceil_div(units, rounds));
    } else if (alike) {
      plan.workers = static_cast<int32_t>(parts * units);
    } else {
      const int64_t batch_units = units / shape.batch, of_each = max_workers / batch_units;
      if (of_each * batch_units * 10 >= max_workers * 9) {
        plan.sequences = static_cast<int32_t>(batch_units);
      }
      const int64_t most = max_workers / plan.sequences, all = units / plan.sequences * splits;
      plan.workers = static_cast<int32_t>(std::min(most, all)) * plan.sequences;
    }
    return plan;
  }
};

}  // namespace jax_flash::sm90
