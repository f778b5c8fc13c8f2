// Adds ALiBi slopes and relative biases to logits, and computes their gradients. They depend on the
// distance between query and key, which is the same along a diagonal of a tile. So both need only
// one number for each diagonal.
#pragma once

#include "host/tile.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Calls f(t, d) for every diagonal t of the tile's rows; d is its distance.
template <typename F>
JAX_FLASH_INLINE void for_diagonals(const Head& head, const Tile& tile, F f) {
  const int64_t first = tile.kv_begin - tile.q_begin - first_diagonal(0);
  const int end = first_diagonal(tile.row_begin) + kBlockKv;
  for (int t = first_diagonal(tile.row_end - 1); t < end; ++t) f(t, head.distance.of(first + t));
}

// Adds the biases by distance to the tile's rows of s. Without a bias, these are uninitialized, and
// are overwritten.
inline void add_by_distance(const Head& head, const Tile& tile, bool has_bias, Matrix s) {
  const ByDistance& distance = head.distance;
  float added[kDiagonals];
  for_diagonals(head, tile, [&](int t, int64_t d) {
    const float linear = distance.slope * static_cast<float>(d);
    added[t] = distance.table ? linear + distance.table[distance.index(d)] : linear;
  });
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    const float* from = added + first_diagonal(r);
    float* to = s.data + r * s.row;
    for (int v = 0; v < tile.vectors(); ++v) {
      const Vec x = load(from + v * kLanes);
      store(to + v * kLanes, has_bias ? load(to + v * kLanes) + x : x);
    }
  }
}

// Points to sums of the gradient of one head's logits. Null: not wanted.
struct DistanceSums {
  float* slope = nullptr;  // of the gradient times the distance
  float* table = nullptr;  // [R]
};

// Adds the gradient of one tile to the sums.
inline void add_distance_gradients(const Head& head, const Tile& tile, Matrix ds,
                                   const DistanceSums& sums) {
  float diagonals[kDiagonals] = {};
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    const float* from = ds.data + r * ds.row;
    float* to = diagonals + first_diagonal(r);
    for (int v = 0; v < tile.vectors(); ++v) {
      store(to + v * kLanes, load(to + v * kLanes) + load(from + v * kLanes));
    }
  }
  if (sums.slope) {
    double slope = 0.0;
    for_diagonals(head, tile, [&](int t, int64_t d) {
      slope += static_cast<double>(diagonals[t]) * static_cast<double>(d);
    });
    *sums.slope += static_cast<float>(slope);
  }
  if (sums.table) {
    // Most distances may be beyond the table, so the first and the last element get many additions:
    // these are summed separately in double.
    const int64_t last = head.distance.count - 1;
    double below = 0.0, above = 0.0;
    for_diagonals(head, tile, [&](int t, int64_t d) {
      const int64_t index = head.distance.index(d);
      if (index == 0) {
        below += diagonals[t];
      } else if (index == last) {
        above += diagonals[t];
      } else {
        sums.table[index] += diagonals[t];
      }
    });
    sums.table[0] += static_cast<float>(below);
    sums.table[last] += static_cast<float>(above);
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
