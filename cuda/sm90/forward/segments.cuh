// Handles packed segments in the sm_90 forward kernel: skips key tiles that share no segment
// with a query tile, and describes the others to consumers.
//
// In sequences packed one after the other, most query tiles have rows of one segment, and most of
// their key tiles have only that segment, so that nothing in them is forbidden. Such tiles are
// contiguous: two numbers describe this run. Consumers read a note for each other tile.
//
// Roles of producer warps: the last warp plans (plan_query_tiles()): it finds the key tiles of each
// unit, one query tile ahead. The first warp copies K and V and writes a note for each stage of K
// (produce_keys_of_segments()). One warp for each consumer copies Q and passes descriptions on
// (produce_queries_of_segments()). Plans pass from the planning warp to the others through two
// slots in shared memory (SegmentNotes).
#pragma once

#include <cstdint>

#include "modifiers/scores.cuh"
#include "modifiers/segments.cuh"
#include "params.h"
#include "ptx/atomic.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/matmul.cuh"

namespace jax_flash::sm90 {

// Finds the key tiles that the rows of a block from row0 on read. Tiles whose segments none of
// the rows has are skipped. Called by whole warps: each lane examines one of 32 tiles. kAlways:
// true if every call of this kernel has segments.
template <typename Config, bool kAlways>
struct SegmentTiles {
  Range range;
  const SegmentSpan* key_spans = nullptr;  // those of this batch, or null without segments
  int32_t key_blocks = 0;
  SegmentSpan query_span = {};
  // A bit for each of the 32 tiles last examined. `read`: the tile is read. `one_segment`: all of
  // its keys and all of the block's rows have the same segment.
  uint32_t read = 0, one_segment = 0;

  // Examines the first tiles.
  __device__ __forceinline__ SegmentTiles(const Band& band, const SegmentSpans& spans,
                                          int32_t batch, int32_t row0)
      : range(kv_tiles<Config::kBlockKv>(band, row0, row0 + Config::kBlockQ)) {
    SegmentSpan key_span = {};
    if (kAlways || spans.query) {
      key_blocks = spans.key_blocks;
      key_spans = spans.key + int64_t{batch} * spans.key_blocks;
      key_span = key_span_at(range.first);
      query_span =
          tile_span<Config::kBlockQ, true>(spans.query + int64_t{batch} * spans.query_blocks,
                                           spans.query_blocks, row0 / Config::kBlockQ);
    }
    compare(range.first, key_span);
  }

  __device__ __forceinline__ bool has_one_segment() const {
    return has_spans() && query_span.least == query_span.greatest;
  }

  __device__ __forceinline__ bool has_spans() const { return kAlways || key_spans; }

  __device__ __forceinline__ void look(int32_t first) {
    compare(first, has_spans() ? key_span_at(first) : SegmentSpan{});
  }

  // Returns the first tile, or `end`, and the run of tiles of one segment. Must precede any look().
  struct Start {
    int32_t tile;
    Range run;
  };
  __device__ __forceinline__ Start start() const {
    // Out of line, since a block's first copies wait for this code.
    if (range.end - range.first > 32) return start_apart(*this);
    Start start = {range.end, {range.end, range.end}};
    if (read != 0) start.tile = range.first + __ffs(read) - 1;
    if (one_segment != 0) {
      const int32_t first = __ffs(one_segment) - 1;
      start.run = {range.first + first, range.end};
      const uint32_t gaps = ~one_segment & ~0u << first;
      if (gaps != 0) start.run.end = range.first + __ffs(gaps) - 1;
    }
    return start;
  }

 private:
  static __device__ __noinline__ Start start_apart(SegmentTiles tiles) {
    const Range range = tiles.range;
    Start start = {range.end, {range.end, range.end}};
    for (int32_t base = range.first; base < range.end; base += 32) {
      if (base != range.first) tiles.look(base);
      if (start.tile == range.end && tiles.read != 0) start.tile = base + __ffs(tiles.read) - 1;
      if (start.run.first == range.end && tiles.one_segment != 0) {
        start.run.first = base + __ffs(tiles.one_segment) - 1;
      }
      if (start.run.first < range.end) {
        const uint32_t gaps = ~tiles.one_segment & ~0u << max(start.run.first - base, 0);
        if (gaps != 0) {
          start.run.end = base + __ffs(gaps) - 1;
          break;
        }
      } else if (start.tile < range.end && !tiles.has_one_segment()) {
        break;
      }
    }
    return start;
  }
  // Returns the span of this lane's tile among those from `first` on.
  __device__ __forceinline__ SegmentSpan key_span_at(int32_t first) const {
    return tile_span<Config::kBlockKv, true>(key_spans, key_blocks,
                                             first + static_cast<int32_t>(threadIdx.x % 32));
  }
  __device__ __forceinline__ void compare(int32_t first, const SegmentSpan& span) {
    const bool exists = first + static_cast<int32_t>(threadIdx.x % 32) < range.end;
    const bool is_read = exists && query_span.meets(span);
    read = __ballot_sync(0xffffffff, is_read);
    one_segment =
        __ballot_sync(0xffffffff, is_read && has_one_segment() && span.least == query_span.least &&
                                      span.greatest == query_span.least);
  }
};

// Describes the segments of a block's rows from row0 on, whose ids begin at `ids`. Called by a
// whole warp. Out of line: not all blocks need it.
template <typename Config>
__device__ __noinline__ void find_query_segments(const int32_t* ids, int64_t stride,
                                                 const Band& band, int32_t row0,
                                                 QuerySegments& segments) {
  constexpr int kRows = Config::kBlockQ / 32;
  const int lane = threadIdx.x % 32;
  int32_t id[kRows];
  uint32_t left = 0;  // a bit per row of this lane
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int32_t row = row0 + i * 32 + lane;
    id[i] = ids[min(row, band.q_len - 1) * stride];
    left |= (row < band.q_len ? 1u : 0u) << i;
  }
  int32_t count = 0;
  while (__reduce_or_sync(0xffffffff, left) != 0) {
    int32_t least = INT32_MAX;
#pragma unroll
    for (int i = 0; i < kRows; ++i) least = left >> i & 1 ? min(least, id[i]) : least;
    least = __reduce_min_sync(0xffffffff, least);
    int32_t first = INT32_MAX, last = 0, rows = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if ((left >> i & 1) == 0 || id[i] != least) continue;
      const int32_t row = row0 + i * 32 + lane;
      first = min(first, row);
      last = max(last, row);
      ++rows;
      left &= ~(1u << i);
    }
    first = __reduce_min_sync(0xffffffff, first);
    last = __reduce_max_sync(0xffffffff, last);
    rows = __reduce_add_sync(0xffffffff, rows);
    if (count == QuerySegments::kMost || last - first + 1 != rows) {
      count = 0;
      break;
    }
    if (lane == 0) {
      segments.id[count] = least;
      segments.rows[count] = {first, last + 1};
    }
    ++count;
  }
  if (lane == 0) segments.count = count;
}

// Finds the keys that a consumer warp's rows from row0 on may attend to, according to segments and
// the band, in a key tile from col0 on that has several segments. Also sets `unattended`
// (SegmentNotes), if `segments` has the information. Each lane examines four keys.
template <typename Config>
__device__ __forceinline__ AllowedBits allowed_by_segments(
    const Forward& params, const ModifierOffsets& offsets, const Band& band, int32_t row0,
    int32_t col0, const QuerySegments& segments, uint32_t (&unattended)[4]) {
  const Operand &queries = params.query_segment_ids, &keys = params.key_value_segment_ids;
  const auto* query_ids = static_cast<const int32_t*>(queries.data) + offsets.query_ids;
  const auto* key_ids = static_cast<const int32_t*>(keys.data) + offsets.key_ids;
  const int lane = threadIdx.x % 32;
  const int32_t col = col0 + lane * 4;
  // At least the number of these four columns that exist.
  const int32_t cols = lane * 4 < Config::kBlockKv ? band.kv_len - col : 0;
  int32_t key_id[4], id[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) key_id[j] = key_ids[min(col + j, band.kv_len - 1) * keys.row];
  uint32_t left = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = row0 + fragment_row(0, 2 * half);
    id[half] = query_ids[min(row, band.q_len - 1) * queries.row];
    left |= (row < band.q_len ? 1u : 0u) << half;
  }
  // Processes one segment of the warp's rows after the other.
  AllowedBits allowed = {};
  while (__reduce_or_sync(0xffffffff, left) != 0) {
    const int32_t mine = min(left & 1 ? id[0] : INT32_MAX, left & 2 ? id[1] : INT32_MAX);
    const int32_t least = __reduce_min_sync(0xffffffff, mine);
    uint32_t same[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) same[j] = __ballot_sync(0xffffffff, j < cols && key_id[j] == least);
    // This thread's columns 8 n + 2 (lane % 4) are those of lanes 2 n and 2 n + 1.
    const uint32_t even = (lane % 2 ? same[2] : same[0]) >> lane % 4 / 2 & 0x55555555;
    const uint32_t odd = (lane % 2 ? same[3] : same[1]) >> lane % 4 / 2 & 0x55555555;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if ((left >> half & 1) == 0 || id[half] != least) continue;
      allowed.row[half] = even | odd << 1;
      left &= ~(1u << half);
    }
  }
  forbid_edges(allowed, band, row0, col0);

  uint32_t mine = (1u << min(max(cols, 0), 4)) - 1;
#pragma unroll
  for (int i = 0; i < QuerySegments::kMost; ++i) {
    if (i >= segments.count) continue;
    const Range rows = segments.rows[i];
    const int32_t first = band.first_col(rows.first), end = band.end_col(rows.end - 1);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (key_id[j] == segments.id[i] && col + j >= first && col + j < end) mine &= ~(1u << j);
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t word = __ballot_sync(0xffffffff, (mine >> j & 1) != 0);
    if (lane == j) unattended[j] = word;
  }
  __syncwarp();
  return allowed;
}

// Zeroes the rows of a tile of V whose bits are set in `unattended`, as the other zero_unattended()
// does.
template <typename Config>
__device__ __forceinline__ void zero_unattended(const typename Config::ValueTile& tile_smem,
                                                const uint32_t (&unattended)[4]) {
  using Tile = typename Config::ValueTile;
  uint32_t word[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) word[j] = unattended[j];
  if (__reduce_or_sync(0xffffffff, word[0] | word[1] | word[2] | word[3]) == 0) return;
  for (int index = threadIdx.x % kWarpgroup; index < Tile::kBytes / 16; index += kWarpgroup) {
    const int row = index % (Tile::kPanelBytes / 16) / 8;
    const uint32_t low = row % 2 ? word[1] : word[0], high = row % 2 ? word[3] : word[2];
    if ((row % 4 < 2 ? low : high) >> row / 4 & 1) {
      ptx::st_shared_v4(tile_smem.root + tile_smem.offset + index * 16, uint4{});
    }
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup);
}

// Must precede init_barriers(), which has a fence.
template <typename Config>
__device__ __forceinline__ void init_plan_barriers(const SegmentNotes<Config>& notes) {
  notes.query.init(Config::kRowGroups);
  notes.keys.init(1);
}

// When a block takes its next unit late, the number of key tiles whose copies have not been
// started.
inline constexpr int kTilesLeft = 1;

// Announces that there is no more work. Called by one thread.
template <typename Config>
__device__ __forceinline__ void hand_over_end(SegmentNotes<Config>& notes) {
  notes.keys.value.base = -1;
  ptx::mbarrier_arrive(notes.keys.full());
  notes.query.value.work.row0 = -1;
  ptx::mbarrier_arrive(notes.query.full());
}

// Takes the block's units of work, and plans their tiles ahead of the warps that start copies.
// Called by one warp. Blocks take units in turn, since the lengths of units are not known in
// advance.
template <typename Config, typename Element, uint32_t kModifiers>
__device__ __forceinline__ void plan_query_tiles(const Forward& params, const ForwardPlan& plan,
                                                 const SegmentSpans& spans,
                                                 SegmentNotes<Config>& notes) {
  const bool leader = threadIdx.x % 32 == 0;
  QueryTilePlan& query = notes.query.value;
  KeyTilesPlan& keys = notes.keys.value;
  uint32_t query_turns = 0, key_turns = 0;
  bool is_first = true, keys_taken = false;
  const auto await_keys_taken = [&] {
    if (!keys_taken) notes.keys.wait_empty(key_turns);
    keys_taken = true;
  };
  QueryTileCursor cursor{plan.schedule};
  while (cursor.valid()) {
    const QueryTileIndex q = cursor.index();
    const Band band = plan.band.of<true>(q.batch_axes);
    const int32_t row0 = q.tile * Config::kBlockQ;
    if (is_first) ptx::griddepcontrol_wait();  // waits for the spans
    constexpr bool kAlways = kModifiers != kEveryModifier;
    SegmentTiles<Config, kAlways> tiles(band, spans, q.batch, row0);
    const auto hand_over_keys = [&](int32_t base) {
      keys_taken = false;
      if (!leader) return;
      keys.base = base;
      keys.read = tiles.read;
      keys.one_segment = tiles.one_segment;
      keys.is_last = base + 32 >= tiles.range.end;
      const int32_t count = __popc(tiles.read);
      keys.left =
          cursor.unit >= plan.schedule.late && keys.is_last ? min(count, kTilesLeft) : count;
      ptx::mbarrier_arrive(notes.keys.full());
    };
    await_keys_taken();
    if (leader) keys.index = q;
    hand_over_keys(tiles.range.first);
    notes.query.wait_empty(query_turns);
    if (leader) {
      query.index = q;
      query.work.row0 = row0;
      describe_query_tile<Config, Element, kModifiers>(params, plan, q, band, row0, query.work);
    }
    is_first = false;
    const auto start = tiles.start();
    const bool many_segments = tiles.has_spans() && !tiles.has_one_segment();
    if (many_segments && start.tile < tiles.range.end) {
      __syncwarp();
      find_query_segments<Config>(static_cast<const int32_t*>(params.query_segment_ids.data) +
                                      query.work.modifiers.query_ids,
                                  params.query_segment_ids.row, band, row0, query.segments);
    }
    if (leader) {
      query.work.tile = start.tile;
      query.work.end = tiles.range.end;
      query.segments.run = start.run;
      if (!many_segments) {
        query.segments.set_one(tiles.query_span.least,
                               {row0, min(row0 + Config::kBlockQ, band.q_len)});
      }
      ptx::mbarrier_arrive(notes.query.full());
    }
#pragma unroll 1  // the fewer cache lines of code are executed, the better
    for (int32_t base = tiles.range.first + 32; base < tiles.range.end; base += 32) {
      tiles.look(base);
      await_keys_taken();
      hand_over_keys(base);
    }
    // The next unit is taken only after the copying warp has taken this unit's last plan: a block
    // that is ahead of others should not hold back units from them.
    await_keys_taken();
    const int32_t unit = cursor.unit;
    cursor.advance();
    if (cursor.unit != unit && spans.counter) {
      const int32_t taken = leader ? ptx::atomic_increment(spans.counter) : 0;
      cursor.unit = static_cast<int32_t>(gridDim.x) + __shfl_sync(0xffffffff, taken, 0);
    }
  }
  await_keys_taken();
  notes.query.wait_empty(query_turns);
  if (leader) hand_over_end<Config>(notes);
}

// Copies K and V for all query tiles, and writes the notes of key tiles. Called by one warp, whose
// first lane does the work.
template <typename Config>
__device__ __forceinline__ void produce_keys_of_segments(const ForwardPlan& plan,
                                                         const ForwardMaps& maps,
                                                         const ForwardSmem<Config>& smem) {
  if (threadIdx.x % 32 != 0) return;
  SegmentNotes<Config>& notes = *smem.segments;
  uint32_t turns = 0;
  RingState<Config::kStages> key_stage;
  RingState<Config::kValueStages> value_stage;
  // The copy of a tile's keys starts when the next tile is known, since the note describes both.
  // The copy of its values starts after that of the next tile's keys.
  int32_t last = -1, before = -1;
  bool last_one_segment = false;
  // Reads the axes before any tile is known.
  BoxAxes key_axes = plan.key, value_axes = plan.value;
  const auto keep = [](BoxAxes& axes) {
    asm volatile("" : "+r"(axes.row), "+r"(axes.head), "+r"(axes.batch[0]), "+r"(axes.batch[1]));
  };
  keep(key_axes);
  keep(value_axes);
  for (;;) {
    notes.keys.wait_full(turns);
    const KeyTilesPlan tiles = notes.keys.value;
    if (tiles.base < 0) return;
    const QueryTileIndex& q = tiles.index;
    if (tiles.read == 0) ptx::mbarrier_arrive(notes.keys.empty());
    for (uint32_t left = tiles.read; left != 0 || tiles.is_last; left &= left - 1) {
      if (left != 0 && __popc(left) == tiles.left) ptx::mbarrier_arrive(notes.keys.empty());
      const int lane = __ffs(left) - 1;
      const int32_t tile = left != 0 ? tiles.base + lane : -1;
      const bool one_segment = left != 0 && (tiles.one_segment >> lane & 1) != 0;
      if (last >= 0) {
        ptx::mbarrier_wait(smem.key_empty(key_stage.stage), key_stage.parity ^ 1);
        notes.notes[key_stage.stage] = KeyTileNote(tile, last_one_segment, one_segment);
        load_tile_boxes(smem.key(key_stage.stage), maps.key, smem.key_full(key_stage.stage),
                        key_axes, q.batch_axes, q.kv_head, last * Config::kBlockKv);
        key_stage.advance();
      }
      if (before >= 0) {
        ptx::mbarrier_wait(smem.value_empty(value_stage.stage), value_stage.parity ^ 1);
        load_tile_boxes(smem.value(value_stage.stage), maps.value,
                        smem.value_full(value_stage.stage), value_axes, q.batch_axes, q.kv_head,
                        before * Config::kBlockKv);
        value_stage.advance();
      }
      before = last;
      last = tile;
      last_one_segment = one_segment;
      if (last < 0 && before < 0) break;
    }
  }
}

// Called by a whole warp.
template <typename T>
__device__ __forceinline__ void copy_by_lanes(const T& from, T& to) {
  static_assert(sizeof(T) % sizeof(uint32_t) == 0);
  constexpr int kWords = sizeof(T) / sizeof(uint32_t);
#pragma unroll
  for (int first = 0; first < kWords; first += 32) {
    const int word = first + static_cast<int>(threadIdx.x) % 32;
    if (word >= kWords) continue;
    reinterpret_cast<uint32_t*>(&to)[word] = reinterpret_cast<const uint32_t*>(&from)[word];
  }
}

// Copies a consumer's rows of the query tiles, and describes the query tiles to it. Called by one
// warp.
template <typename Config>
__device__ __forceinline__ void produce_queries_of_segments(const ForwardPlan& plan,
                                                            const ForwardMaps& maps,
                                                            const ForwardSmem<Config>& smem,
                                                            int group) {
  const bool leader = threadIdx.x % 32 == 0;
  SegmentNotes<Config>& notes = *smem.segments;
  RingState<Config::kQueryStages> stage;
  const auto load = [&](const QueryTileIndex& q) {
    load_tile_boxes(smem.query(stage.stage, group), maps.query, smem.query_full(stage.stage, group),
                    plan.query, q.batch_axes, q.head, q.tile * Config::kBlockQ + group * 64);
  };
  // The first query tile is known at once.
  if (leader) load(QueryTileCursor{plan.schedule}.index());
  __syncwarp();
  uint32_t turns = 0;
  for (uint32_t works = 0;; ++works) {
    notes.query.wait_full(turns);
    const QueryTileIndex q = notes.query.value.index;
    const bool is_end = notes.query.value.work.row0 < 0;
    copy_by_lanes(notes.query.value.work, smem.work(group, works));
    copy_by_lanes(notes.query.value.segments, smem.query_segments(group, works));
    __syncwarp();
    if (leader) {
      const uint32_t full = smem.query_full(stage.stage, group);
      ptx::mbarrier_arrive(notes.query.empty());
      ptx::mbarrier_wait_asleep(smem.query_empty(stage.stage, group), stage.parity ^ 1);
      if (is_end) {
        ptx::mbarrier_arrive(full);
      } else if (works > 0) {
        load(q);
      }
      ptx::mbarrier_arrive(full);
    }
    __syncwarp();
    if (is_end) return;
    stage.advance();
  }
}

// Forbids keys of other segments. Few tiles have several segments. Only for these are ids compared,
// and `allowed` set.
template <typename Config, typename Element, uint32_t kModifiers>
struct SegmentsModifier : ModifierDefaults<Config, Element, kModifiers> {
  using Base = ModifierDefaults<Config, Element, kModifiers>;
  static constexpr bool kDescribedLate = true, kSkips = true, kHasRuns = true;
  static constexpr int kForbidBlocks = Config::kHeadDim / 64;  // as for masks
  AllowedBits allowed;

  __device__ __forceinline__ SegmentsModifier(const Forward&, const ForwardPlan&,
                                              const ForwardSmem<Config>&, int) {}

  // Finds which elements of a tile of several segments are allowed.
  template <typename Consumer>
  static __device__ __forceinline__ void look_at(Consumer& consumer, int32_t tile) {
    if (consumer.one_segment) return;
    const QueryWork& work = consumer.work;
    consumer.modifier.allowed = allowed_by_segments<Config>(
        consumer.params, work.modifiers, work.band, work.row0 + consumer.warp_row,
        tile * Config::kBlockKv,
        consumer.smem.query_segments(consumer.query_tile(), consumer.works - 1),
        consumer.unattended());
    consumer.columns = attended_by_warp<Base::kN>(consumer.modifier.allowed);
  }
  template <typename Consumer>
  static __device__ __forceinline__ void attend_rest(Consumer& consumer, int32_t& tile) {
    for (;;) {
      for (; consumer.run_goes_on(tile); ++tile) {
        consumer.template next_tile<TileKind::kInRun>(tile, tile + 1);
      }
      if (consumer.is_last(tile)) break;
      const int32_t last = tile;
      tile = consumer.note.next();
      consumer.next_tile(last, tile, consumer.note.next_one_segment());
    }
  }
  __device__ __forceinline__ void forbid_all(typename Base::Scores& scores) const {
#pragma unroll
    for (int n = 0; n < Base::kN; n += kForbidBlocks) forbid<kForbidBlocks>(scores[0], allowed, n);
  }
};

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kSegments> : SegmentsModifier<Config, Element, kSegments> {
  using SegmentsModifier<Config, Element, kSegments>::SegmentsModifier;
};

}  // namespace jax_flash::sm90
