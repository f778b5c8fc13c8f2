// Defines the order of the key blocks of a launch, of the query tiles that each key block visits,
// and, in deterministic runs, of the turns in which blocks add to a query tile's dQ.
#pragma once

#include <algorithm>
#include <cstdint>

#include "modifiers/segments.cuh"
#include "plan/divisor.h"
#include "tile/band.cuh"

namespace jax_flash::sm90 {

// Maps an index to the head and key tile that a block owns. Heads of all batches are numbered
// consecutively, and divided into sections of `section_heads`. Within a section, all heads' first
// tiles come first, then all heads' second tiles, and so on.
struct TileSchedule {
  int32_t tiles = 0, total_heads = 0, sections = 0;
  Divisor section_heads, last_section_heads, section_blocks;
  bool last_first = false;
  bool alternates = false;  // every other section has its heads' last tiles first

  TileSchedule() = default;
  TileSchedule(int64_t tiles_of_head, int64_t heads, int64_t heads_of_section,
               bool last_tiles_first)
      : tiles(static_cast<int32_t>(tiles_of_head)),
        total_heads(static_cast<int32_t>(heads)),
        sections(static_cast<int32_t>((heads + heads_of_section - 1) / heads_of_section)),
        section_heads(static_cast<int32_t>(heads_of_section)),
        last_section_heads(
            static_cast<int32_t>(std::max<int64_t>(heads - (sections - 1) * heads_of_section, 1))),
        section_blocks(static_cast<int32_t>(
            std::clamp<int64_t>(heads_of_section * tiles_of_head, 1, INT32_MAX))),
        last_first(last_tiles_first) {}

  // Finds the head and tile of an index. Returns the number of its section.
  __device__ __forceinline__ int32_t at(int32_t index, int32_t& head, int32_t& tile) const {
    const int32_t section = section_blocks.quotient(index);
    const int32_t rest = index - section * section_blocks.divisor;
    const Divisor& heads_here = section == sections - 1 ? last_section_heads : section_heads;
    tile = heads_here.quotient(rest);
    head = section * section_heads.divisor + rest - tile * heads_here.divisor;
    if (last_first || (alternates && section % 2 != 0)) tile = tiles - 1 - tile;
    return section;
  }
};

// Selects how blocks take turns to add to a sum for dQ, independently of timing. The turns follow
// the order in which blocks would reach the sum if all blocks of a section started together, or if
// each started when a block of the section before ends. Then hardly any block waits. All blocks of
// a section must run at the same time. They do, because a launch has as many thread blocks as a
// section has blocks, and each takes one block of every section.
enum class TurnOrder : int32_t {
  kNone,
  kTogether,
  kAscending,  // a head has too many blocks: each waits only for those of lower keys
};

// Holds the range of query tiles, by their first rows from `first` to `last`, 64 rows each, in
// which all rows and all of the block's keys have the same segment, so that no pair has to be
// compared. `all`: true if this holds for all tiles that the block visits, and these are
// neighbours.
struct AlikeRows {
  int32_t first = INT32_MAX, last = -1;
  bool all = true;
};

// Identifies a query tile of a query head.
struct HeadTile {
  int32_t head, tile;
};

// Walks over the query tiles that a block visits, head by head, for all its heads. Within a head,
// the walk may start at any tile and wrap around, or go from the last tile to the first. Whole
// warps call its functions.
struct QueryTileWalk {
  Range range;
  int32_t first_head, end_head;
  int32_t start = 0, first_tile = 0;  // start of each head, and of the first head
  bool backward = false;
  const SegmentSpan* query_spans = nullptr;
  int32_t query_blocks = 0;
  SegmentSpan key_span = {};

  template <int kBlockQ>
  __device__ __forceinline__ int32_t skip_to(int32_t candidate) const {
    if (query_spans == nullptr) return candidate;
    return next_tile<kBlockQ>(query_spans, query_blocks, key_span, candidate, range.end);
  }
  // Restricts the walk to tiles that have a segment of the block's keys. Returns the tiles that
  // have no other segment; `all` only if the walk skips none between them.
  template <int kBlockQ>
  __device__ __forceinline__ AlikeRows skip_segments(const SegmentSpan* spans, int32_t blocks,
                                                     const SegmentSpan& keys) {
    int32_t first = range.end, end = range.first, count = 0;
    int32_t first_alike = range.end, end_alike = range.first, count_alike = 0;
    const auto add = [](uint32_t votes, int32_t tile, int32_t& first, int32_t& end,
                        int32_t& count) {
      if (votes == 0) return;
      first = min(first, tile + __ffs(votes) - 1);
      end = tile + 32 - __clz(votes);
      count += __popc(votes);
    };
    for (int32_t tile = range.first; tile < range.end; tile += 32) {
      const int32_t mine = tile + static_cast<int32_t>(threadIdx.x % 32);
      SegmentSpan span = {INT32_MAX, INT32_MIN};
      if (mine < range.end) span = tile_span<kBlockQ, true>(spans, blocks, mine);
      const bool meets = mine < range.end && keys.meets(span);
      const bool alike = meets && min(keys.least, span.least) == max(keys.greatest, span.greatest);
      add(__ballot_sync(0xffffffff, meets), tile, first, end, count);
      add(__ballot_sync(0xffffffff, alike), tile, first_alike, end_alike, count_alike);
    }
    range = {first, max(first, end)};
    if (count != range.end - range.first) {
      query_spans = spans;
      query_blocks = blocks;
      key_span = keys;
    }
    AlikeRows rows;
    rows.all = count_alike == count && count == range.end - range.first;
    if (count_alike > 0 && count_alike == end_alike - first_alike) {
      rows.first = first_alike * kBlockQ;
      rows.last = end_alike * kBlockQ - 64;
    }
    return rows;
  }
  template <int kBlockQ>
  __device__ __forceinline__ void start_at(int32_t shift) {
    start = skip_to<kBlockQ>(range.first + shift);
    first_tile = start;
    if (range.first >= range.end || start >= range.end) first_head = end_head;
  }
  // Lets the walk begin at its index-th tile.
  __device__ __forceinline__ void skip(int32_t index) {
    const HeadTile cursor = at(index);
    first_head = cursor.head;
    first_tile = cursor.tile;
  }
  __device__ __forceinline__ HeadTile begin() const { return {first_head, first_tile}; }
  __device__ __forceinline__ bool done(const HeadTile& at) const { return at.head >= end_head; }
  template <int kBlockQ>
  __device__ __forceinline__ int32_t count() const {
    if (query_spans == nullptr) return (range.end - range.first) * (end_head - first_head);
    int32_t tiles = 0;
    for (HeadTile at = begin(); !done(at); advance<kBlockQ>(at)) ++tiles;
    return tiles;
  }
  // Returns the index-th tile of the walk. Valid only if no tile is skipped.
  __device__ __forceinline__ HeadTile at(int32_t index) const {
    const int32_t tiles = range.end - range.first, heads = index / tiles;
    const int32_t place = index - heads * tiles;
    const int32_t tile = backward ? start - place : start + place;
    return {first_head + heads, tile < range.end ? tile : tile - tiles};
  }
  // Advances to the next tile. kOrdered: blocks take turns; otherwise no walk goes backward.
  template <int kBlockQ, bool kOrdered = false>
  __device__ __forceinline__ void advance(HeadTile& at) const {
    const bool down = kOrdered && backward;
    at.tile = down ? at.tile - 1 : skip_to<kBlockQ>(at.tile + 1);
    if (down && at.tile < range.first) at.tile = start;
    // With segments, walks are not shifted, and the first tile that is not skipped is `start`.
    if (at.tile >= range.end) at.tile = query_spans ? start : range.first;
    if (at.tile == start) ++at.head;
  }
};

// True if every row may attend to every key. With turns, all blocks then visit all tiles, and their
// starts are shifted.
__device__ __forceinline__ bool is_rectangle(const Band& band) {
  return band.lo <= 1 - band.q_len && band.hi >= band.kv_len;
}

// Returns by how many tiles the start of a block is shifted, in calls with turns where every row
// may attend to every key. The blocks of a head then start at different query tiles.
template <int kBlockKv>
__device__ __forceinline__ int32_t shifted_start(const Band& band, const Range& range,
                                                 int32_t kv_tile) {
  const int32_t kv_tiles_here = (band.kv_len + kBlockKv - 1) / kBlockKv;
  return static_cast<int32_t>(static_cast<uint32_t>(kv_tile) * (range.end - range.first) /
                              kv_tiles_here);
}

// Returns the turn of the block of tile kv_tile: how many of the blocks that add to a query tile,
// those of `range`, do so before it. These are the blocks that reach the tile earlier (see
// TurnOrder) if all blocks take equally long for a tile. With kSums sums, each sum has every
// kSums-th block.
template <int kSums>
__device__ __forceinline__ int32_t turn_of(const Band& band, bool ascending, int32_t kv_tile,
                                           int32_t q_tile, int32_t q_tiles_total,
                                           const Range& range) {
  if (ascending) return (kv_tile - range.first) / kSums;
  const int32_t later = (range.end - 1 - kv_tile) / kSums;
  if (!is_rectangle(band)) return later;
  // Blocks up to `last` start at this query tile or before it, and the later of them reach it
  // first. The other blocks reach it after they wrap around.
  const uint32_t ends = static_cast<uint32_t>(q_tile + 1) * range.end;  // fits: see divide_keys()
  const int32_t last = static_cast<int32_t>((ends + q_tiles_total - 1) / q_tiles_total) - 1;
  return kv_tile <= last ? (last - kv_tile) / kSums
                         : (last + kSums - kv_tile % kSums) / kSums + later;
}

}  // namespace jax_flash::sm90
