// Maps the index of a thread block to one of `tiles` tiles of a head.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

// Consecutive blocks belong to one head, and share its rows in L2. The blocks of the last heads are
// an exception if tiles differ in length, as under a causal mask: there, the first tile of all of
// these heads comes first, then their second tile, and so on. Tiles must be numbered from the
// longest to the shortest, so that the last blocks are short and multiprocessors finish at about
// the same time.
struct BlockPlace {
  // The number of blocks that are ordered by tiles: two to four for each place of a
  // multiprocessor.
  static constexpr uint32_t kByTile = 512;

  uint32_t head, tile;

  // Returns the number of heads whose blocks are ordered by tiles.
  static __device__ __forceinline__ uint32_t last_heads(uint32_t tiles, uint32_t heads) {
    return min((kByTile + tiles - 1) / tiles, heads);
  }
  __device__ __forceinline__ BlockPlace(uint32_t block, uint32_t tiles, uint32_t heads,
                                        uint32_t last) {
    const uint32_t first = (heads - last) * tiles;
    if (block < first) {
      head = block / tiles;
      tile = block - head * tiles;
    } else {
      tile = (block - first) / last;
      head = heads - last + (block - first) - tile * last;
    }
  }
};

// Names what a block works on: kBlockQ query rows of a head.
template <int kBlockQ>
struct QueryTilePlace {
  int32_t tile, head;
  int64_t batch_index;

  // Heads of a group are consecutive, and share keys in L2. Under a causal mask, the last queries
  // have the most keys, so with `last_first` they go first.
  __device__ __forceinline__ QueryTilePlace(const Forward& params, uint32_t index,
                                            bool last_first) {
    const Shape& shape = params.shape;
    const uint32_t tiles = (shape.q_len + kBlockQ - 1) / kBlockQ;
    const auto heads = static_cast<uint32_t>(shape.batch * shape.heads);
    const bool uneven = params.options.is_causal && last_first;
    const BlockPlace place(index, tiles, heads, uneven ? BlockPlace::last_heads(tiles, heads) : 0);
    const auto position = static_cast<int32_t>(place.tile);
    tile = last_first ? static_cast<int32_t>(tiles) - 1 - position : position;
    head = static_cast<int32_t>(place.head % shape.heads);
    batch_index = place.head / shape.heads;
  }
  static __host__ __device__ int64_t count(const Shape& shape) {
    return (int64_t{shape.q_len} + kBlockQ - 1) / kBlockQ * shape.heads * shape.batch;
  }
};

// Names what a block works on: kBlockKv keys of a key/value head.
template <int kBlockKv>
struct KeyTilePlace {
  int32_t tile, kv_head;
  uint32_t batch_kv_head;
  int64_t batch_index;

  // Under a causal mask, the first keys have the most query rows, so they go first. With `by_tile`,
  // for calls with turns, consecutive blocks belong to different heads: as few blocks of a head as
  // possible run at the same time.
  __device__ __forceinline__ KeyTilePlace(const Forward& params, uint32_t block, bool by_tile) {
    const Shape& shape = params.shape;
    const uint32_t tiles = (shape.kv_len + kBlockKv - 1) / kBlockKv;
    const auto heads = static_cast<uint32_t>(shape.batch * shape.kv_heads);
    const uint32_t last = params.options.is_causal ? BlockPlace::last_heads(tiles, heads) : 0;
    const BlockPlace place(block, tiles, heads, by_tile ? heads : last);
    tile = static_cast<int32_t>(place.tile);
    batch_kv_head = place.head;
    kv_head = static_cast<int32_t>(batch_kv_head % shape.kv_heads);
    batch_index = batch_kv_head / shape.kv_heads;
  }
};

}  // namespace jax_flash
