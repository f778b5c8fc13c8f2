// Defines matrices of 16-bit elements in shared memory, and reads mma fragments from them.
//
// A matrix is stored in panels of 64 columns; a row of a panel is 128 bytes, eight chunks of 16.
// Chunk c of row r is stored at position c ^ (r % 8): eight rows of one chunk, which one phase of
// ldmatrix reads, are then spread over all 32 banks, and so are the eight chunks of a row.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

// Switch of the ablation (sm80/config.cuh): 0 stores chunk c at position c.
#ifndef JAX_FLASH_SM80_SWIZZLE
#define JAX_FLASH_SM80_SWIZZLE 1
#endif

namespace jax_flash {

inline constexpr int kChunk = 8;  // elements in 16 bytes, the unit of copies

template <int kRowCount, int kColCount>
struct SmemTile {
  static constexpr int kRows = kRowCount, kCols = kColCount;
  static constexpr int kPanels = (kCols + 63) / 64;
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;

  uint32_t root;    // base of the block's tiles: a multiple of 1024
  uint32_t offset;  // distance of the tile from the root: a multiple of 1024

  // Returns where chunk `chunk` of row `row` would be in a tile at the root.
  __device__ __forceinline__ uint32_t root_address(int row, int chunk) const {
    return root + (chunk >> 3) * kPanelBytes + row * 128 +
           ((chunk ^ (JAX_FLASH_SM80_SWIZZLE ? row : 0)) & 7) * 16;
  }
  __device__ __forceinline__ uint32_t address(int row, int chunk) const {
    return root_address(row, chunk) + offset;
  }
};

// Says in which order the four 8x8 matrices of a 16x16 block are read. Operands need these two:
//   kRowsFirst: A stored [m, k] (plain), B stored [k, n] (transposed)
//   kColsFirst: B stored [n, k] (plain), A stored [k, m] (transposed)
enum class BlockOrder { kRowsFirst, kColsFirst };

// Gives the addresses from which a warp reads 16x16 blocks of a tile. It holds one address per
// lane, from which that of another block is an exclusive or and an addition of constants. The
// tile's own offset is among the constants, so that tiles that are read in the same way share
// registers.
template <typename Tile>
struct BlockReader {
  uint32_t lane_address;
  uint32_t offset;

  __device__ __forceinline__ BlockReader(const Tile& tile, BlockOrder order, int row, int chunk)
      : offset(tile.offset) {
    const int lane = threadIdx.x % 32;
    const bool rows_first = order == BlockOrder::kRowsFirst;
    const int lane_row = rows_first ? lane & 15 : (lane & 7) + (lane >> 4) * 8;
    const int lane_chunk = rows_first ? lane >> 4 : (lane >> 3) & 1;
    lane_address = tile.root_address(row + lane_row, chunk + lane_chunk);
  }

  // `rows` is a multiple of 8; `chunks` has no bit below 8 in common with the reader's chunk.
  __device__ __forceinline__ uint32_t at(int rows, int chunks) const {
    return (lane_address ^ (chunks % 8 * 16)) +
           (offset + chunks / 8 * Tile::kPanelBytes + rows * 128);
  }
};

// Starts copying rows row0 ... row0 + kRows - 1 of a [*, cols] matrix in global memory into a tile.
// Rows outside [first, end) and columns from `cols` on are not read, and filled with zeros, so that
// padding and rows that nobody may attend to, which may hold NaN, never take part.
template <int kThreads, typename Element, typename Tile>
__device__ __forceinline__ void load_tile(const Tile& tile, const Element* gmem, int64_t row_stride,
                                          int32_t row0, int32_t first, int32_t end, int cols) {
  constexpr int kRowStep = kThreads / 8;
  static_assert(kRowStep % 8 == 0 && Tile::kRows % kRowStep == 0);
  const int chunk = threadIdx.x % 8, row = threadIdx.x / 8;
  const uint32_t address = tile.address(row, chunk);
  const Element* source = gmem + int64_t{row0 + row} * row_stride + chunk * kChunk;
#pragma unroll
  for (int step = 0; step < Tile::kRows / kRowStep; ++step) {
    const int32_t global_row = row0 + row + step * kRowStep;
    const bool row_valid = global_row >= first && global_row < end;
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; ++panel) {
      // The last panel of 96 columns is half empty.
      if (panel * 64 + chunk * kChunk >= Tile::kCols) continue;
      const bool valid = row_valid && panel * 64 + chunk * kChunk < cols;
      ptx::cp_async_16(address + step * kRowStep * 128 + panel * Tile::kPanelBytes,
                       source + step * kRowStep * row_stride + panel * 64, valid);
    }
  }
}

}  // namespace jax_flash
