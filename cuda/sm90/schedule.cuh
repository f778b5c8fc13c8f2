// Which query tiles a block of a persistent grid computes, in which order.
#pragma once

#include <cstdint>

namespace jax_flash::sm90 {

struct QueryTileIndex {
  int64_t batch;
  int32_t head;
  int32_t tile;
};

// Units of work lie in a row, the units of a head side by side, so that blocks at work together
// share keys and values in L2; block b takes units b, b + blocks, ... A unit is one query tile or,
// with `paired`, a tile and the one as far from the other end: under a causal mask the costs of
// such a pair are the same for all. So every block gets its share without a counter in memory,
// which something would have to reset before each call.
struct QueryTileSchedule {
  int32_t q_tiles, heads;
  int32_t total_heads;  // batch * heads
  bool paired;

  __host__ __device__ __forceinline__ int32_t units_per_head() const {
    return paired ? (q_tiles + 1) / 2 : q_tiles;
  }
  __host__ __device__ __forceinline__ int32_t units() const {
    return units_per_head() * total_heads;
  }
};

// A block's place in its list of query tiles.
struct QueryTileCursor {
  const QueryTileSchedule& schedule;
  int32_t unit = static_cast<int32_t>(blockIdx.x);
  bool second = false;

  __device__ __forceinline__ bool valid() const { return unit < schedule.units(); }

  __device__ __forceinline__ QueryTileIndex index() const {
    const int32_t head = unit / schedule.units_per_head();
    const int32_t position = unit % schedule.units_per_head();
    return {head / schedule.heads, head % schedule.heads,
            schedule.paired && !second ? schedule.q_tiles - 1 - position : position};
  }

  __device__ __forceinline__ void advance() {
    const int32_t position = unit % schedule.units_per_head();
    if (schedule.paired && !second && position != schedule.q_tiles - 1 - position) {
      second = true;
      return;
    }
    second = false;
    unit += static_cast<int32_t>(gridDim.x);
  }
};

}  // namespace jax_flash::sm90
