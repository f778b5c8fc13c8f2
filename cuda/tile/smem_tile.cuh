// Defines matrices in shared memory, and reads mma fragments from them.
//
// A matrix is stored in panels of 64 columns of 16-bit elements, or 32 of float32; a row of a panel
// is 128 bytes, eight chunks of 16. Chunk c of row r is stored at position c ^ swizzle(r): eight
// rows of one chunk, which one phase of ldmatrix reads, are then spread over all 32 banks, and so
// are the eight chunks of a row.
#pragma once

#include <cstdint>

#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/shared.cuh"
#include "ptx/tf32.cuh"

// Switch of the ablation (sm80/config.cuh): 0 stores chunk c at position c.
#ifndef JAX_FLASH_SM80_SWIZZLE
#define JAX_FLASH_SM80_SWIZZLE 1
#endif

namespace jax_flash {

inline constexpr int kChunk = 8;  // elements in 16 bytes, the unit of copies

template <int kRowCount, int kColCount, int kElementBytes = 2>
struct SmemTile {
  static constexpr int kRows = kRowCount, kCols = kColCount;
  static constexpr int kChunkCols = 16 / kElementBytes, kPanelCols = 8 * kChunkCols;
  static constexpr int kPanels = (kCols + kPanelCols - 1) / kPanelCols;
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kPanels * kPanelBytes;

  uint32_t root;    // base of the block's tiles: a multiple of 1024
  uint32_t offset;  // distance of the tile from the root: a multiple of 1024

  // Swizzle of float32. ldmatrix cannot transpose 32-bit elements, so such fragments are read in
  // two contiguous chunks of four rows at a time: rows 4 i to 4 i + 3, or every second row of
  // eight. The swizzle, which is linear over exclusive or, spreads both over all banks.
  static __device__ __forceinline__ int swizzle(int row) {
    return (row & 2) << 1 | ((row ^ row >> 2) & 1) << 1 | (row & 1);
  }
  // Returns the address that chunk `chunk` of row `row` has in a tile at the root.
  __device__ __forceinline__ uint32_t root_address(int row, int chunk) const {
    if constexpr (kElementBytes == 4) {
      return root + (chunk >> 3) * kPanelBytes + row * 128 + ((chunk ^ swizzle(row)) & 7) * 16;
    }
    return root + (chunk >> 3) * kPanelBytes + row * 128 +
           ((chunk ^ (JAX_FLASH_SM80_SWIZZLE ? row : 0)) & 7) * 16;
  }
  __device__ __forceinline__ uint32_t address(int row, int chunk) const {
    return root_address(row, chunk) + offset;
  }
};

// Order in which the four 8x8 matrices of a 16x16 block are read. Operands need these two:
//   kRowsFirst: A stored [m, k] (plain), B stored [k, n] (transposed)
//   kColsFirst: B stored [n, k] (plain), A stored [k, m] (transposed)
enum class BlockOrder { kRowsFirst, kColsFirst };

// Computes the addresses from which a warp reads 16x16 blocks of a tile. It holds one address per
// lane. The address of another block follows from it by an exclusive or and an addition of
// constants. The tile's own offset is among the constants, so that tiles that are read in the same
// way share registers.
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

// Order of the inner dimension in a step of 8: the columns of A, or rows of B, that are a thread's
// two operands are t and t + 4, or 2 t and 2 t + 1, as in accumulators.
enum class StepOrder { kApart, kPaired };

// Reads 8x16 blocks of a tile of float32 as transposed fragments: of a B stored [k, n], or of an A
// stored [k, m]. A thread's two columns are neighbours, so that one load reads both. The order of
// columns therefore differs: in B's two 8x8 blocks, column g of the first is column 2 g of the
// tile, and column g of the second is column 2 g + 1. The same holds for rows g and g + 8 of A's
// block.
template <typename Tile, StepOrder kOrder = StepOrder::kApart>
struct TransposedReader {
  uint32_t lane_address;
  uint32_t offset;

  __device__ __forceinline__ TransposedReader(const Tile& tile, int row, int chunk)
      : offset(tile.offset) {
    const int group = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
    const int lane_row = kOrder == StepOrder::kPaired ? 2 * lane : lane;
    lane_address = tile.root_address(row + lane_row, chunk + group / 2) + group % 2 * 8;
  }

  // Sets {columns of the first row, columns of the second row}; see BlockReader::at().
  __device__ __forceinline__ void read(uint32_t (&words)[4], int rows, int chunks) const {
    constexpr int kSecondRow = kOrder == StepOrder::kPaired ? 1 : 4;
    constexpr uint32_t kSecondSwizzle = kOrder == StepOrder::kPaired ? 3 * 16 : 2 * 16;
    const uint32_t distance = offset + chunks / 8 * Tile::kPanelBytes + rows * 128;
    const uint32_t swizzled = lane_address ^ (chunks % 8 * 16);
    const uint2 first = ptx::ld_shared_v2(swizzled + distance);
    const uint2 second =
        ptx::ld_shared_v2((swizzled ^ kSecondSwizzle) + distance + kSecondRow * 128);
    words[0] = first.x;
    words[1] = first.y;
    words[2] = second.x;
    words[3] = second.y;
  }
  // Sets the fragments of B's two blocks.
  __device__ __forceinline__ void read_b(uint32_t (&b)[4], int rows, int chunks) const {
    uint32_t words[4];
    read(words, rows, chunks);
    b[0] = words[0];
    b[1] = words[2];
    b[2] = words[1];
    b[3] = words[3];
  }
};

// Selects the chunks of a float32 tile that a thread copies: `chunk` of rows row, row + kRowStep,
// ... of panels panel, panel + kPanelStep, ...
template <int kThreads, typename Tile>
struct ChunksOfThread {
  static constexpr int kRowStep = kThreads / 8 < Tile::kRows ? kThreads / 8 : Tile::kRows;
  static constexpr int kPanelStep = kThreads / 8 / kRowStep;  // above 1 where there are few rows
  static_assert(kRowStep % 8 == 0 && Tile::kRows % kRowStep == 0 &&
                Tile::kPanels % kPanelStep == 0);

  int chunk = threadIdx.x % 8, row = threadIdx.x / 8 % kRowStep;
  int panel = kPanelStep == 1 ? 0 : threadIdx.x / (8 * kRowStep);

  // Calls body(rows and columns from the thread's first chunk on, and bytes of the tile).
  template <typename Body>
  __device__ __forceinline__ void for_each(Body body) const {
#pragma unroll
    for (int rows = 0; rows < Tile::kRows; rows += kRowStep) {
#pragma unroll
      for (int panels = 0; panels < Tile::kPanels; panels += kPanelStep) {
        body(rows, panels * Tile::kPanelCols, rows * 128 + panels * Tile::kPanelBytes);
      }
    }
  }
  __device__ __forceinline__ uint32_t address(const Tile& tile) const {
    return tile.address(row, chunk) + panel * Tile::kPanelBytes;
  }
};

// Does the work of load_tile() for float32. Rows may begin at any address and have any number of
// columns.
template <int kThreads, typename Element, typename Tile>
__device__ __forceinline__ void load_float32_tile(const Tile& tile, const Element* gmem,
                                                  int64_t row_stride, int32_t row0, int32_t first,
                                                  int32_t end, int cols) {
  const ChunksOfThread<kThreads, Tile> mine;
  const uint32_t address = mine.address(tile);
  const int col0 = mine.panel * Tile::kPanelCols + mine.chunk * 4;
  const Element* source = gmem + int64_t{row0 + mine.row} * row_stride + col0;
  const auto copy = [&](auto body) {
    mine.for_each([&](int rows, int more_cols, int bytes) {
      const int32_t row = row0 + mine.row + rows;
      const int valid = row >= first && row < end ? min(max(cols - col0 - more_cols, 0), 4) : 0;
      body(address + bytes, source + rows * row_stride + more_cols, valid);
    });
  };
  if (reinterpret_cast<uintptr_t>(gmem) % 16 == 0 && row_stride % 4 == 0) {
    copy([](uint32_t to, const Element* from, int valid) {
      ptx::cp_async_16_of(to, from, valid * 4);
    });
  } else {
    copy([](uint32_t to, const Element* from, int valid) {
#pragma unroll 1
      for (int e = 0; e < 4; ++e) ptx::cp_async_4(to + e * 4, from + e, e < valid);
    });
  }
}

// Rounds to TF32 those elements of a tile that this thread has copied by load_tile(). The copies
// must have arrived.
template <int kThreads, typename Tile>
__device__ __forceinline__ void round_own_chunks(const Tile& tile) {
  const ChunksOfThread<kThreads, Tile> mine;
  const uint32_t address = mine.address(tile);
  mine.for_each([&](int, int, int bytes) {
    const uint4 words = ptx::ld_shared_v4(address + bytes);
    ptx::st_shared_v4(address + bytes,
                      make_uint4(ptx::round_to_tf32(words.x), ptx::round_to_tf32(words.y),
                                 ptx::round_to_tf32(words.z), ptx::round_to_tf32(words.w)));
  });
}

// Starts the copy of rows row0 ... row0 + kRows - 1 of a [*, cols] matrix in global memory to a
// tile. Rows outside [first, end) and columns from `cols` on are not read, and filled with zeros:
// padding and rows that no query may attend to may hold NaN, and must not take part in products.
template <int kThreads, typename Element, typename Tile>
__device__ __forceinline__ void load_tile(const Tile& tile, const Element* gmem, int64_t row_stride,
                                          int32_t row0, int32_t first, int32_t end, int cols) {
  if constexpr (sizeof(Element) == 4) {
    return load_float32_tile<kThreads>(tile, gmem, row_stride, row0, first, end, cols);
  } else {
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
}

}  // namespace jax_flash
