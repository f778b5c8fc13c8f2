// Defines tile sizes and the shared-memory layout of the sm_90 decoding kernel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/decode.h"
#include "ptx/mbarrier.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/parts.cuh"
#include "tile/band.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm90 {

// Configures a block, which is one worker: a warpgroup that computes, and two warps that start
// copies. A multiprocessor has two blocks, or one block with as many bytes of keys and values in
// flight as two.
template <int kHeadDimension, int kBlockKvRows, int kSlotCount, int kBlocksPerSm>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDimension, kBlockKv = kBlockKvRows;
  static constexpr int kBlocks = kBlocksPerSm;
  static constexpr int kThreads = kWarpgroup + 64;
  using QueryTile = SmemTile<kDecodeRows, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = KeyTile;
  // Shared memory holds Q, then a ring in which tiles of K and of V alternate.
  static constexpr int kSlots = kSlotCount;
  static constexpr int kSmemBytes = QueryTile::kBytes + kSlots * KeyTile::kBytes;
  // A block also has 1 KB that the system reserves, and up to 1 KB of barriers and alignment.
  static_assert(kBlocks * (kSmemBytes + 2048) <= 228 * 1024 && kSlots >= 3);
};

// Selects the configuration for this head dim.
template <int kHeadDim>
using DecodeConfigOf = std::conditional_t<
    kHeadDim <= 64, DecodeConfig<64, 128, 6, 2>,
    std::conditional_t<kHeadDim <= 128, DecodeConfig<kHeadDim, 64, 6, 2>,
                       std::conditional_t<kHeadDim <= 192, DecodeConfig<192, 32, 7, 2>,
                                          DecodeConfig<256, 64, 6, 1>>>>;

// Describes a worker's part of a unit.
struct DecodeWork {
  void* out;           // for the unit's first row; in the workspace for a part to be combined
  float *lse, *sinks;  // `lse` is for the statistics of such a part
  Band band;
  Range attended;     // keys that some row may attend to
  int32_t queries;    // of the unit
  int32_t tile, end;  // key tiles; empty only if the unit has none
  int32_t kind;

  static constexpr int32_t kPart = 0, kWhole = 1, kNoMoreWork = 2;
};

// Gives the addresses of tiles and barriers. A `full` barrier completes its phase when the copy has
// arrived, an `empty` one when the warpgroup has read the tile.
template <typename Config>
struct DecodeSmem {
  static constexpr int kBarriers = 2 + 2 * Config::kSlots;
  uint32_t root, barriers;
  DecodeWork* work;

  __device__ __forceinline__ typename Config::QueryTile query() const { return {root, 0}; }
  __device__ __forceinline__ typename Config::KeyTile slot(uint32_t index) const {
    return {root, Config::QueryTile::kBytes + index * Config::KeyTile::kBytes};
  }
  __device__ __forceinline__ uint32_t query_full() const { return barriers; }
  __device__ __forceinline__ uint32_t query_empty() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t full(uint32_t slot) const {
    return barriers + 16 + slot * 16;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const { return full(slot) + 8; }

  __device__ __forceinline__ void init_barriers() const {
    ptx::mbarrier_init(query_full(), 2);  // Q, and the description of the work
    ptx::mbarrier_init(query_empty(), 4 * kWarpArrivals);
    for (uint32_t slot = 0; slot < Config::kSlots; ++slot) {
      ptx::mbarrier_init(full(slot), 1);
      ptx::mbarrier_init(empty(slot), 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace jax_flash::sm90
