// Divides calls with short sequences into the units of the sm_90 kernels for these
// (sm90/forward/short.cuh, sm90/backward/short.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/divisor.h"

namespace jax_flash::sm90 {

// The number of rows, of 128 bytes each, in a box of an operand, and the most tiles of 64 rows that
// a unit has of each operand.
inline constexpr int32_t kShortBoxRows = 16, kShortTiles = 5;
// The most units in shared memory, and the most boxes of a unit, so that there is room for two.
inline constexpr int32_t kShortStages = 8, kShortBoxes = 55;
// Products of a unit's last tile of rows read up to three boxes behind Q. K and V have two at
// least.
inline constexpr int32_t kShortSlackBytes = kShortBoxRows * 128;

// The keys of a unit of the general kernel, which takes any modifiers: a tile of 64. With more
// tiles, other kernels are faster: they compute a tile's modifiers beside the products of another
// one.
inline constexpr int32_t kShortGeneralKeys = 64;

// Says how a call is divided: a unit is a part of the query rows of a head, with all of its keys.
struct ShortUnits {
  int32_t parts;             // parts of the rows of a head: a unit each
  int32_t tiles;             // tiles of 64 query rows in a part
  int32_t q_boxes, k_boxes;  // boxes of Q in a unit, and of K
  int64_t units;

  static bool takes(const Shape& shape, bool general) {
    return shape.kv_len <= (general ? kShortGeneralKeys : kShortTiles * 64);
  }

  ShortUnits(const Shape& shape, bool general) {
    k_boxes = general ? kShortGeneralKeys / kShortBoxRows
                      : static_cast<int32_t>(ceil_div(shape.kv_len, kShortBoxRows));
    const int64_t all_boxes = ceil_div(shape.q_len, kShortBoxRows);
    const int64_t all_tiles = ceil_div(shape.q_len, 64);
    const int32_t free = kShortBoxes - 2 * k_boxes;
    const bool whole = all_boxes <= free && all_tiles <= kShortTiles;
    parts = whole ? 1 : static_cast<int32_t>(ceil_div(all_tiles, std::min(free / 4, 4)));
    tiles = static_cast<int32_t>(ceil_div(all_tiles, parts));
    q_boxes = static_cast<int32_t>(std::min<int64_t>(all_boxes, tiles * (64 / kShortBoxRows)));
    units = int64_t{parts} * shape.heads * shape.batch;
  }

  // Returns how many of an operand's `boxes` one copy brings: a divisor of them, as the copy engine
  // takes at most 256 rows.
  static int32_t boxes_of_copy(int32_t boxes) {
    for (int32_t count = 256 / kShortBoxRows; count > 1; --count) {
      if (boxes % count == 0) return count;
    }
    return 1;
  }

  int32_t unit_bytes() const { return (q_boxes + 2 * k_boxes) * kShortBoxRows * 128; }
  int32_t stages() const {
    return std::min(kShortStages, 2 * kShortBoxes / (q_boxes + 2 * k_boxes));
  }
};

// The most tiles of 64 rows of an operand in a unit of the backward kernel, which is a head:
// the general one takes fewer.
inline constexpr int32_t kShortGradientTiles = 4, kShortGeneralTiles = 3;

// Returns the tiles of the operand that has more of them.
inline int32_t short_gradient_tiles(const Shape& shape) {
  return static_cast<int32_t>(ceil_div(std::max(shape.q_len, shape.kv_len), 64));
}
inline bool takes_short_gradient(const Shape& shape, bool general) {
  const int32_t most = general ? kShortGeneralTiles : kShortGradientTiles;
  return shape.heads == shape.kv_heads && short_gradient_tiles(shape) <= most &&
         shape.batch * shape.heads <= INT32_MAX / 2;
}

}  // namespace jax_flash::sm90
