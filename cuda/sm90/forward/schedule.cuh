// Decides which query tiles a block computes, and in which order: QueryTileSchedule on the host,
// QueryTileCursor in the kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/tensor_map.h"

namespace jax_flash::sm90 {

struct QueryTileIndex {
  int32_t batch;
  int32_t batch_axes[kTensorMapBatchDims];
  int32_t head, kv_head;
  int32_t tile;
};

// Orders the units of work in one sequence. The units of a head are contiguous, so that blocks that
// run at the same time share keys and values in L2. Of the first `chained` units, block b takes
// units b, b + blocks, ... After these blocks come others of one unit each, which the hardware
// distributes. A unit is one query tile or, with `paired`, a tile and the one at the same distance
// from the other end: under a causal mask the costs of all such pairs are the same. Blocks thus get
// equal shares without a counter in memory, which would have to be reset before each call. With
// segments there is such a counter, and blocks take units in turn (sm90/forward/segments.cuh).
struct QueryTileSchedule {
  int32_t q_tiles = 0, units = 0, blocks = 0, chained = 0;
  bool paired = false;
  PlainDivisor units_per_head, heads, group, inner_batch;

  QueryTileSchedule() = default;
  QueryTileSchedule(const Shape& shape, int32_t tiles, bool in_pairs)
      : q_tiles(tiles),
        paired(in_pairs),
        units_per_head(in_pairs ? (tiles + 1) / 2 : tiles),
        heads(shape.heads),
        group(shape.heads / shape.kv_heads),
        inner_batch(shape.num_batch_dims > 1 ? static_cast<int32_t>(shape.batch_dims[1]) : 1) {
    units = static_cast<int32_t>(units_per_head.divisor * shape.heads * shape.batch);
    chained = units;
  }

  // Divides the units among `multiprocessors`. `apart`: each unit is a block of its own.
  // `most_rest`: the most units left over, per block, that become blocks of their own.
  void divide(int32_t multiprocessors, bool apart, double most_rest) {
    blocks = std::min(units, multiprocessors);
    const int32_t rest = units % blocks;
    // Multiprocessors differ in speed by some percent. Those that finish first take the rest,
    // unless many of them would have to start one more block.
    if (rest <= most_rest * blocks) chained -= rest;
    if (apart) chained = blocks;
  }
  int64_t grid() const { return int64_t{blocks} + units - chained; }
};

// Describes the end of a call whose blocks take units in turn: shorter units, so that blocks finish
// at about the same time. The last heads are not divided into pairs. Each of their query tiles is a
// unit, and the same tile of all of these heads is contiguous in the order, from the longest to the
// shortest under a causal mask.
struct QueryTileTail {
  static constexpr int kLeast = 4, kMost = 8;  // units of one query tile, per multiprocessor
  static constexpr int kLate = 2;              // number of units before those, likewise

  int32_t first = INT32_MAX, first_head = 0;  // the unit and the head at which they begin
  int32_t late = INT32_MAX;  // from this unit on, blocks take the next one as late as they can
  PlainDivisor heads;

  QueryTileTail() = default;
  QueryTileTail(QueryTileSchedule& schedule, int32_t multiprocessors) {
    if (schedule.paired) split(schedule, multiprocessors);
    late = schedule.units - (kLate + kMost) * multiprocessors;
  }

 private:
  void split(QueryTileSchedule& schedule, int32_t multiprocessors) {
    const int32_t per_head = schedule.units_per_head.divisor, all = schedule.units / per_head;
    // If there were more heads than this, fewer than four query tiles that run at the same time
    // would share keys and values, and these would not stay in L2.
    const int32_t enough = multiprocessors / 4;
    const auto heads_of = [&](int unit_count) {
      return unit_count * multiprocessors / schedule.q_tiles;
    };
    heads = PlainDivisor(std::clamp(std::clamp(enough, heads_of(kLeast), heads_of(kMost)), 1, all));
    first_head = all - heads.divisor;
    first = first_head * per_head;
    schedule.units = schedule.chained = first + heads.divisor * schedule.q_tiles;
  }
};

#if defined(__CUDACC__)
// Holds a block's position in its list of query tiles.
struct QueryTileCursor {
  const QueryTileSchedule& schedule;
  // The same query tile of this many batches, a power of two, is contiguous in the order.
  int32_t batch_shift = 0;
  bool alone = static_cast<int32_t>(blockIdx.x) >= schedule.blocks;  // a block of one unit
  int32_t unit =
      static_cast<int32_t>(blockIdx.x) + (alone ? schedule.chained - schedule.blocks : 0);
  int32_t step = schedule.blocks, end = alone ? unit + 1 : schedule.chained;
  bool second = false;

  __device__ __forceinline__ bool valid() const { return unit < end; }

  __device__ __forceinline__ QueryTileIndex index() const {
    const int32_t head = schedule.units_per_head.quotient(unit >> batch_shift);
    const int32_t position = (unit >> batch_shift) - head * schedule.units_per_head.divisor;
    QueryTileIndex q = of_head(head);
    q.tile = schedule.paired && !second ? schedule.q_tiles - 1 - position : position;
    return q;
  }
  __device__ __forceinline__ QueryTileIndex index(const QueryTileTail& tail) const {
    int32_t head, tile;
    if (unit < tail.first) {
      head = schedule.units_per_head.quotient(unit);
      tile = unit - head * schedule.units_per_head.divisor;
      if (schedule.paired && !second) tile = schedule.q_tiles - 1 - tile;
    } else {
      const int32_t turn = tail.heads.quotient(unit - tail.first);
      head = tail.first_head + unit - tail.first - turn * tail.heads.divisor;
      tile = schedule.q_tiles - 1 - turn;
    }
    QueryTileIndex q = of_head(head);
    q.tile = tile;
    return q;
  }

  __device__ __forceinline__ void advance() {
    if (schedule.paired && !second) {
      const int32_t head = schedule.units_per_head.quotient(unit >> batch_shift);
      const int32_t position = (unit >> batch_shift) - head * schedule.units_per_head.divisor;
      if (position != schedule.q_tiles - 1 - position) {
        second = true;
        return;
      }
    }
    second = false;
    unit += step;
  }
  __device__ __forceinline__ void advance(const QueryTileTail& tail) {
    if (unit < tail.first) return advance();
    unit += step;
  }

 private:
  // Sets all but the tile. `head`: counted over all batches.
  __device__ __forceinline__ QueryTileIndex of_head(int32_t head) const {
    QueryTileIndex q;
    q.batch = schedule.heads.quotient(head);
    q.head = head - q.batch * schedule.heads.divisor;
    q.batch = (q.batch << batch_shift) + (unit & ((1 << batch_shift) - 1));
    q.kv_head = schedule.group.quotient(q.head);
    q.batch_axes[0] = schedule.inner_batch.quotient(q.batch);
    q.batch_axes[1] = q.batch - q.batch_axes[0] * schedule.inner_batch.divisor;
    return q;
  }
};
#endif

}  // namespace jax_flash::sm90
