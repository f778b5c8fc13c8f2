// The order of key tiles in the sm_90 forward kernel where a window's left edge cuts the first one.
//
// Some rows of the query tile have few of its keys or none, and so a reference behind it that says
// little or none: all tiles would be taken with references that follow the greatest logits. So the
// second one comes first, and the first one last. Producers count tiles from the second to one
// behind the last, which stands for the first (turned_tile()).
#pragma once

#include <cstdint>

#include "sm90/forward/plan.cuh"
#include "sm90/forward/redo.cuh"
#include "sm90/forward/schedule.cuh"
#include "tile/band.cuh"

namespace jax_flash::sm90 {

// Which kernels do that.
template <typename Config, uint32_t kModifiers>
inline constexpr bool kTurns = kChecksLate<Config, kModifiers> && !Config::kScoresAhead;

// For a query tile from row0 on. A branch for calls without a window: query tiles wait for it.
template <typename Config>
__device__ __forceinline__ bool turns(const ForwardPlan& plan, const TileRange& range,
                                      const Band& band, int32_t row0) {
  if (plan.band.options.window_left < 0) [[likely]]
    return false;
  const int32_t row_end = min(row0 + Config::kBlockQ, band.q_len);
  return row_end - 1 + band.lo > range.first * Config::kBlockKv && range.end - range.first > 2;
}

// The keys of the tile that a producer counts as `tile`. `attended`: by the query tile.
template <typename Config, uint32_t kModifiers>
__device__ __forceinline__ int32_t turned_tile(int32_t tile, const RowRange& attended) {
  if (!kTurns<Config, kModifiers> || tile * Config::kBlockKv < attended.end) return tile;
  return attended.first / Config::kBlockKv;
}

}  // namespace jax_flash::sm90
