// Reorders the key tiles in the sm_90 forward kernel if a window's left edge, or the first key that
// a mask of keys allows, cuts the first one.
//
// Some rows of the query tile then have few of the first tile's keys or none, and their running
// maxima after it predict little or nothing: all tiles would be processed with running maxima that
// follow the greatest logits. The second tile is therefore processed first, and the first one last.
// Producers count tiles from the second to one past the last. The latter count stands for the first
// tile (reordered_tile()).
#pragma once

#include <cstdint>

#include "sm90/forward/plan.cuh"
#include "sm90/forward/redo.cuh"
#include "sm90/forward/schedule.cuh"
#include "tile/band.cuh"

namespace jax_flash::sm90 {

// True for kernels that reorder key tiles.
template <typename Config, uint32_t kModifiers>
inline constexpr bool kReorders = kChecksLate<Config, kModifiers> && !Config::kScoresAhead;

// Returns whether the tiles of the query tile from row0 on are reordered. `first_key`: the first
// key that a mask of keys allows, or 0. The first branch serves calls without a window, since query
// tiles wait for this function.
template <typename Config>
__device__ __forceinline__ bool reorders(const ForwardPlan& plan, const Range& range,
                                         const Band& band, int32_t row0, int32_t first_key) {
  if (Config::kKeyMask && first_key > range.first * Config::kBlockKv) {
    return range.end - range.first > 2;
  }
  if (plan.band.options.window_left < 0) [[likely]]
    return false;
  const int32_t row_end = min(row0 + Config::kBlockQ, band.q_len);
  return row_end - 1 + band.lo > range.first * Config::kBlockKv && range.end - range.first > 2;
}

// Returns the tile of the keys that a producer counts as `tile`. `attended`: the range of keys that
// the query tile attends to.
template <typename Config, uint32_t kModifiers>
__device__ __forceinline__ int32_t reordered_tile(int32_t tile, const Range& attended) {
  if (!kReorders<Config, kModifiers> || tile * Config::kBlockKv < attended.end) return tile;
  return attended.first / Config::kBlockKv;
}

}  // namespace jax_flash::sm90
