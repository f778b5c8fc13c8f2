// Decides which query tiles a block computes, and in which order: QueryTileSchedule on the host,
// QueryTileCursor in the kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/remembered.h"
#include "plan/tensor_map.h"

namespace jax_flash::sm90 {

struct QueryTileIndex {
  int32_t batch;
  int32_t batch_axes[kTensorMapBatchDims];
  int32_t head, kv_head;
  int32_t tile;
};

// Describes the end of a call: units of one query tile, so that blocks finish at about the same
// time. The last heads are not divided into pairs. Their tiles are in order of length, from the
// longest to the shortest under a causal mask: first `sharing` tiles of each head, so that
// neighbouring blocks share keys and values in the same half of L2, then as many others of each
// head, and so on. Units from `first` to before `singles` are pairs of one of the longest and one
// of the shortest.
struct QueryTileTail {
  int32_t first = INT32_MAX, singles = INT32_MAX;  // units
  int32_t first_head = 0, tiles = 0;
  PlainDivisor turn, sharing;  // turn: the number of tiles in `sharing` tiles of each head
};

// Orders the units of work in one sequence. The units of a head are contiguous, so that blocks that
// run at the same time share keys and values in L2. A unit is one query tile or, with `paired`, a
// tile and the one at the same distance from the other end: under a causal mask the costs of all
// such pairs are the same. With `two_heads` the second tile is one of the next head. Pairs are
// followed by a tail. Blocks take units in one of three ways:
//
//   deal()          Block b takes units b, b + blocks, ... of the first `chained`. After these
//                   blocks come others of one unit each, which the hardware distributes. The tail's
//                   tiles are taken back and forth: b, 2 blocks - 1 - b, 2 blocks + b, ... Blocks
//                   thus get nearly equal shares without a counter in memory, which would have to
//                   be reset before each call.
//   take_in_turn()  Blocks take the next unit by such a counter, where some kernel resets it.
//   set_apart()     Each unit is a block of its own.
//
// Kernels use few instructions for this: a block's first copies wait for each line of code before
// them (TUNING.md).
struct QueryTileSchedule {
  int32_t q_tiles = 0, all_heads = 0, units = 0, blocks = 0, chained = 0;
  int32_t late = INT32_MAX;  // in turn: from this unit on, blocks take the next as late as they can
  bool paired = false, two_heads = false;
  PlainDivisor units_per_head, heads, group, inner_batch;  // units_per_head: or per two heads
  QueryTileTail tail;

  QueryTileSchedule() = default;
  QueryTileSchedule(const Shape& shape, int32_t tiles, bool in_pairs)
      : q_tiles(tiles),
        all_heads(static_cast<int32_t>(shape.batch * shape.heads)),
        units(tiles * all_heads),
        chained(units),
        paired(in_pairs),
        units_per_head(tiles),
        heads(shape.heads),
        group(shape.heads / shape.kv_heads),
        inner_batch(shape.num_batch_dims > 1 ? static_cast<int32_t>(shape.batch_dims[1]) : 1) {}

  // `batch_shift`: as in QueryTileCursor. `most_rest`: the most units left over, per block, that
  // become blocks of their own if units are not paired.
  void deal(int32_t multiprocessors, double most_rest, int32_t batch_shift) {
    blocks = std::min(units, multiprocessors);
    if (paired) return deal_pairs(batch_shift);
    const int32_t rest = units % blocks;
    // Multiprocessors differ in speed by some percent. Those that finish first take the rest,
    // unless many of them would have to start one more block.
    if (rest <= most_rest * blocks) chained -= rest;
  }

  void take_in_turn(int32_t multiprocessors) {
    if (paired) end_pairs(multiprocessors, 0);
    late = units - (kLate + kMost) * multiprocessors;
    blocks = std::min(units, multiprocessors);
  }

  void set_apart(int32_t multiprocessors, int32_t batch_shift) {
    if (paired) end_pairs(multiprocessors, batch_shift);
    chained = blocks = std::min(units, multiprocessors);
  }

  // Divides the units of a kernel that has a counter: each long one gets a block of its own, and
  // blocks take others in turn, if there are more than multiprocessors. Returns whether they do.
  bool divide(int32_t multiprocessors, bool are_long) {
    const bool in_turn = !are_long && units > multiprocessors;
    if (in_turn) {
      take_in_turn(multiprocessors);
    } else if (are_long) {
      set_apart(multiprocessors, 0);
    } else {
      deal(multiprocessors, 0.0, 0);
    }
    return in_turn;
  }

  int64_t grid() const { return int64_t{blocks} + units - chained; }

  // Returns the distance between a block's first two units in the tail. The next distance is
  // 2 * blocks minus this one, and so on.
  JAX_FLASH_HOST_DEVICE int32_t first_step(int32_t block) const { return 2 * (blocks - block) - 1; }

 private:
  // If blocks take units as they become free: the number of units in the tail, and of pairs that
  // are taken late, per multiprocessor.
  static constexpr int kLeast = 4, kMost = 8, kLate = 2;

  // Heads with an odd number of tiles have one in the middle, so that pairs must be of two heads.
  void pair_heads(bool in_twos) {
    two_heads = in_twos || q_tiles % 2 != 0;
    units_per_head = PlainDivisor(two_heads ? q_tiles : q_tiles / 2);
  }
  // The number of heads that are divided into pairs must be a multiple of this.
  int32_t alignment(int32_t batch_shift) const { return (two_heads ? 2 : 1) << batch_shift; }
  int32_t pairs_of(int32_t head_count) const {
    return (two_heads ? head_count / 2 : head_count) * units_per_head.divisor;
  }

  void set_tail(int32_t first_head, int32_t pairs, int32_t sharing) {
    const int32_t of_tail = all_heads - first_head;
    tail.first_head = first_head;
    tail.sharing = PlainDivisor(sharing);
    tail.turn = PlainDivisor(std::max(of_tail, 1) * sharing);
    tail.tiles = of_tail * q_tiles;
    tail.first = pairs_of(first_head);
    tail.singles = tail.first + pairs;
    units = chained = tail.first + tail.tiles - pairs;
  }

  void end_pairs(int32_t multiprocessors, int32_t batch_shift) {
    pair_heads(false);
    // If there were more heads than this, fewer than four query tiles that run at the same time
    // would share keys and values, and these would not stay in L2.
    const int32_t enough = multiprocessors / 4;
    const auto heads_of = [&](int tiles) { return tiles * multiprocessors / q_tiles; };
    const int32_t of_tail = std::clamp(enough, heads_of(kLeast), heads_of(kMost));
    const int32_t first_head = all_heads - std::clamp(of_tail, 1, all_heads);
    set_tail(first_head - first_head % alignment(batch_shift), 0, 1);
  }

  // Compares tails of the tiles of 0 to kMostRounds pairs of each block. The smallest is chosen if
  // it is as good as others: the more heads a tail has, the more keys and values have to stay in
  // L2. If each block has one pair, it is of one head, whose keys and values are then in L2; else
  // of two, which is faster (measured: TUNING.md).
  void deal_pairs(int32_t batch_shift) {
    constexpr int kMostRounds = 3;
    const int32_t rounds = (units + 2 * blocks - 1) / (2 * blocks);
    pair_heads(rounds > 1);
    const QueryTileSchedule without_tail = *this;
    int32_t least = INT32_MAX;
    const auto consider = [&](const QueryTileSchedule& dealt) {
      const int32_t cost = dealt.greatest_cost();
      if (cost >= least) return;
      least = cost;
      *this = dealt;
    };
    if (all_heads % alignment(batch_shift) == 0) {
      QueryTileSchedule dealt = without_tail;
      dealt.set_tail(all_heads, 0, 1);
      dealt.blocks = std::min(dealt.units, blocks);  // each block needs a unit
      consider(dealt);
    }
    for (int32_t of_tail = 1; of_tail <= std::min(rounds, kMostRounds); ++of_tail) {
      for (const bool shares : {true, false}) {
        QueryTileSchedule dealt = without_tail;
        dealt.deal_tail((rounds - of_tail) * without_tail.blocks, batch_shift, shares);
        consider(dealt);
      }
    }
  }

  // Lets the tail begin at `unit` or somewhat before it. Blocks get equal numbers of pairs.
  void deal_tail(int32_t unit, int32_t batch_shift, bool shares) {
    int32_t first_head = 2 * unit / q_tiles, pairs = 0;
    for (;; --first_head) {
      first_head -= first_head % alignment(batch_shift);
      const int32_t rest = pairs_of(first_head) % blocks;
      pairs = rest > 0 ? blocks - rest : 0;
      if (2 * pairs <= (all_heads - first_head) * q_tiles) break;
    }
    const int32_t of_head = blocks / (all_heads - first_head);  // blocks for each head
    int32_t sharing = shares ? std::clamp(of_head, 1, q_tiles) : 1;
    while (q_tiles % sharing != 0) --sharing;
    set_tail(first_head, pairs, sharing);
  }

  // Returns the greatest cost of a block under a causal mask. The unit is the cost of as many keys
  // as a query tile has rows; to begin a query tile costs about as much.
  int32_t greatest_cost() const {
    const int32_t of_pairs = (tail.singles + blocks - 1) / blocks * (q_tiles + 3);
    const int32_t sharing = tail.sharing.divisor;
    int32_t greatest = 0;
    for (int32_t block = 0; block < blocks; ++block) {
      int32_t cost = 0, unit = tail.singles + block;
      for (int32_t step = first_step(block); unit < units; step = 2 * blocks - step) {
        const int32_t place = unit - tail.first;
        cost += q_tiles - (place / tail.turn.divisor * sharing + place % sharing) + 1;
        unit += step;
      }
      greatest = std::max(greatest, cost);
    }
    return of_pairs + greatest;
  }
};

// Lets a schedule deal() its units. How pairs are dealt is remembered, since it takes the host 5 to
// 16 us to compare tails.
inline void deal(QueryTileSchedule& schedule, int32_t multiprocessors, double most_rest,
                 int32_t batch_shift) {
  if (!schedule.paired) return schedule.deal(multiprocessors, most_rest, batch_shift);
  static Remembered<QueryTileSchedule, 7> dealt;
  schedule = dealt.get(
      {schedule.q_tiles, schedule.all_heads, schedule.heads.divisor, schedule.group.divisor,
       schedule.inner_batch.divisor, multiprocessors, batch_shift},
      [&] {
        schedule.deal(multiprocessors, most_rest, batch_shift);
        return schedule;
      });
}

#if defined(__CUDACC__)
// Holds a block's position in its list of query tiles.
struct QueryTileCursor {
  const QueryTileSchedule& schedule;
  // The same query tile of this many batches, a power of two, is contiguous in the order.
  int32_t batch_shift = 0;
  bool alone = static_cast<int32_t>(blockIdx.x) >= schedule.blocks;  // a block of one unit
  int32_t unit =
      static_cast<int32_t>(blockIdx.x) + (alone ? schedule.chained - schedule.blocks : 0);
  int32_t end = alone ? unit + 1 : schedule.chained;
  int32_t step = alone ? 1 : schedule.first_step(static_cast<int32_t>(blockIdx.x));  // in the tail
  bool second = false;  // true at the second tile of a pair

  __device__ __forceinline__ bool valid() const { return unit < end; }

  __device__ __forceinline__ QueryTileIndex index() const {
    const QueryTileTail& tail = schedule.tail;
    const int32_t mask = (1 << batch_shift) - 1, last = schedule.q_tiles - 1;
    if (unit < tail.first) {
      int32_t head = schedule.units_per_head.quotient(unit >> batch_shift);
      int32_t tile = (unit >> batch_shift) - head * schedule.units_per_head.divisor;
      if (schedule.two_heads) head = 2 * head + (second ? 1 : 0);
      if (schedule.paired && !second) tile = last - tile;
      return index(head, unit & mask, tile);
    }
    int32_t place = unit - tail.first;  // among the tail's tiles
    if (second) place = tail.tiles - 1 - place;
    const int32_t turn = tail.turn.quotient(place);
    place -= turn * tail.turn.divisor;
    const int32_t of_tail = tail.sharing.quotient(place), head = tail.first_head + of_tail;
    const int32_t from_last = (turn - of_tail) * tail.sharing.divisor + place;
    return index(head >> batch_shift, head & mask, last - from_last);
  }

  __device__ __forceinline__ void advance() {
    if (unit >= schedule.tail.singles) {
      unit += step;
      step = 2 * schedule.blocks - step;
    } else {
      second = schedule.paired && !second;
      if (!second) unit += schedule.blocks;
    }
  }

 private:
  // `head`: counted over all batches, or groups of contiguous batches, of which `batch` is one.
  __device__ __forceinline__ QueryTileIndex index(int32_t head, int32_t batch, int32_t tile) const {
    QueryTileIndex q;
    q.batch = schedule.heads.quotient(head);
    q.head = head - q.batch * schedule.heads.divisor;
    q.batch = (q.batch << batch_shift) + batch;
    q.kv_head = schedule.group.quotient(q.head);
    q.batch_axes[0] = schedule.inner_batch.quotient(q.batch);
    q.batch_axes[1] = q.batch - q.batch_axes[0] * schedule.inner_batch.divisor;
    q.tile = tile;
    return q;
  }
};
#endif

}  // namespace jax_flash::sm90
