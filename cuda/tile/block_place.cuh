// Maps the index of a thread block to one of `tiles` tiles of a head.
#pragma once

#include <cstdint>

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

}  // namespace jax_flash
