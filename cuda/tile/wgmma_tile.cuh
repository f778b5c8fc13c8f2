// Computes the matrix descriptors by which wgmma reads tiles in shared memory (PTX ISA,
// "Asynchronous warpgroup level matrix shared memory layout: matrix descriptor").
//
// A SmemTile has the 128-byte swizzle that the copy engine (TMA) writes: panels of 64 columns, 1024
// bytes per eight rows.
#pragma once

#include <cstdint>

#include "tile/smem_tile.cuh"
#include "wgmma.h"

namespace jax_flash {

// Returns the constant part of a descriptor: layout type 1 (128-byte swizzle) at bit 62, offsets in
// units of 16 bytes.
__device__ __forceinline__ constexpr uint64_t descriptor_layout(uint32_t leading_bytes,
                                                                uint32_t stride_bytes) {
  return uint64_t{1} << 62 | uint64_t{stride_bytes / 16} << 32 | uint64_t{leading_bytes / 16} << 16;
}

// Returns a descriptor. Addresses are below 2^18 and multiples of 16. The constant part of an
// offset is divided separately, so that one addition turns a descriptor into another. kLowWord: no
// `or` follows the addition, which is not faster everywhere (TUNING_modifiers.md).
template <bool kLowWord, typename Tile>
__device__ __forceinline__ uint64_t descriptor_at(const Tile& tile, uint32_t layout_leading,
                                                  uint32_t constant_offset) {
  const uint64_t layout = descriptor_layout(layout_leading, 1024);
  if constexpr (kLowWord) {
    const uint32_t low =
        (static_cast<uint32_t>(layout) | (tile.root + tile.offset) >> 4) + (constant_offset >> 4);
    return layout >> 32 << 32 | low;
  } else {
    return layout | (((tile.root + tile.offset) >> 4) + (constant_offset >> 4));
  }
}

// Returns the descriptor of an operand whose columns are the inner dimension (K-major): rows
// row0... of the tile are rows of a or columns of b in the product; 16 columns from 16 k on.
template <bool kLowWord = false, typename Tile>
__device__ __forceinline__ uint64_t descriptor_k_major(const Tile& tile, int row0, int k) {
  return descriptor_at<kLowWord>(tile, 16, k / 4 * Tile::kPanelBytes + row0 * 128 + k % 4 * 32);
}

// Returns the descriptor of an operand whose rows are the inner dimension (MN-major, which wgmma
// calls transposed): 16 rows from 16 k on, columns from col0 on. col0 is a multiple of 64, or of 8
// if the columns end within the panel.
template <bool kLowWord = false, typename Tile>
__device__ __forceinline__ uint64_t descriptor_mn_major(const Tile& tile, int col0, int k) {
  return descriptor_at<kLowWord>(tile, Tile::kPanelBytes,
                                 col0 / 64 * Tile::kPanelBytes + k * 16 * 128);
}

}  // namespace jax_flash
