// Divides the work of the sm_90 decoding kernel among workers, as far as shapes determine it. This
// is plain C++, because the size of the workspace depends on it, too.
//
// A unit is all query rows of one key/value head of one batch entry, with the tiles of its keys.
// The units are ordered as [batch, kv_heads], so all tiles form one sequence. There are three ways
// to divide the sequence among workers: at the ends of units; each unit into the same number of
// parts; or evenly by tiles, anywhere. In the last two cases, a second kernel combines the partial
// results of a unit.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace jax_flash::sm90 {

inline constexpr int kDecodeRows = 64;        // the most rows of a unit
inline constexpr int kDecodeSplitKeys = 256;  // a worker's part of a unit usually has more keys
inline constexpr int kDecodeMultiprocessors = 132;  // the most multiprocessors that are used
inline constexpr int kDecodeMaxWorkers = 2 * kDecodeMultiprocessors;
// With more batch entries, workers take whole units: to divide units of different lengths, each
// worker first reads the lengths of all batch entries.
inline constexpr int64_t kDecodeMaxRaggedBatch = 2048;

inline int64_t decode_rows(const Shape& shape) {
  return shape.kv_heads == 0 ? 0 : int64_t{shape.heads / shape.kv_heads} * shape.q_len;
}

// Returns whether the decoding kernel takes a call of this shape, if it has no modifiers. Tiles of
// at least 32 keys are counted in 32 bits.
inline bool takes_decode(const Shape& shape) {
  const int64_t rows = decode_rows(shape);
  return rows > 0 && rows <= kDecodeRows && shape.kv_len > 0 && shape.batch > 0 &&
         shape.batch * shape.kv_heads <= INT32_MAX &&
         shape.batch * shape.kv_heads * (shape.kv_len / 32 + 1) <= INT32_MAX;
}

inline int64_t decode_splits(const Shape& shape) {
  return (int64_t{shape.kv_len} + kDecodeSplitKeys - 1) / kDecodeSplitKeys;
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
  struct Ends {
    int32_t head, tail;  // units, or -1
  };

  float* out = nullptr;         // [rows, workers, 2, decode_pitch()], not divided by the sums
  float* statistics = nullptr;  // [rows, workers, 2, 2]: running maximum in log2 units, sum
  Ends* ends = nullptr;         // [workers]
  int32_t places = 0;           // number of places of all workers

  static int64_t max_workers(const Shape& shape) {
    return std::min(int64_t{kDecodeMaxWorkers},
                    shape.batch * shape.kv_heads * decode_splits(shape));
  }
  static int64_t bytes(const Shape& shape) {
    if (!takes_decode(shape) || decode_splits(shape) == 1) return 0;
    const int64_t rows = 2 * max_workers(shape) * decode_rows(shape);
    return rows * (pitch(shape) + 2) * 4 + max_workers(shape) * int64_t{sizeof(Ends)};
  }
  static DecodeWorkspace at(const Shape& shape, void* workspace) {
    const int64_t rows = 2 * max_workers(shape) * decode_rows(shape);
    DecodeWorkspace result;
    result.out = static_cast<float*>(workspace);
    result.statistics = result.out + rows * pitch(shape);
    result.ends = reinterpret_cast<Ends*>(result.statistics + rows * 2);
    result.places = static_cast<int32_t>(2 * max_workers(shape));
    return result;
  }

 private:
  static int64_t pitch(const Shape& shape) {
    return decode_pitch(std::max(shape.head_dim, shape.value_dim));
  }
};

struct DecodePlan {
  int32_t workers, units;
  int32_t parts;     // the most parts of each unit; 0: workers divide units anywhere, or none
  bool whole_units;  // true if workers divide no units
  bool ragged;       // true if batch entries may differ in the keys that they attend to

  // `max_workers`: the number of workers that can run at once.
  static DecodePlan make(const Shape& shape, int64_t max_workers, bool ragged) {
    DecodePlan plan;
    const int64_t units = shape.batch * shape.kv_heads, splits = decode_splits(shape);
    const int64_t rounds = (units + max_workers - 1) / max_workers;
    const int64_t parts = std::min(max_workers / units, splits);
    plan.units = static_cast<int32_t>(units);
    plan.ragged = ragged;
    plan.whole_units = splits == 1 || shape.batch > kDecodeMaxRaggedBatch ||
                       (!ragged && units * 10 >= rounds * max_workers * 9);
    // With the same number of parts for each unit, the heads of a batch entry are read at the same
    // time, and no worker handles two units.
    const bool alike =
        !plan.whole_units && !ragged && (parts == splits || parts * units * 10 >= max_workers * 9);
    plan.parts = static_cast<int32_t>(alike ? parts : 0);
    plan.workers = static_cast<int32_t>(plan.whole_units ? (units + rounds - 1) / rounds
                                        : alike          ? parts * units
                                                         : std::min(max_workers, units * splits));
    return plan;
  }
};

}  // namespace jax_flash::sm90
