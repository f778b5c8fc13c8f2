// Defines tile sizes and the shared-memory plan of Hopper's forward kernel for float32.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plan/float32_tiles.h"
#include "ptx/shared.cuh"
#include "sm90/float32_logits.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/tile_barriers.cuh"
#include "tile/band.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm90 {

// The named barrier of the first consumer, if Q is in shared memory. The second one has the next.
inline constexpr int kQueryBarrier = 1;

// Describes a query tile. The producer warp writes it for consumers.
struct Float32Work {
  const float* query;  // this and the next two point to the tile's first row
  float* out;
  float* lse;
  Band band;
  int32_t row0;   // negative: there is no more work
  bool has_keys;  // false if no row attends to a key
  float sink;     // in the units of the logits
  // The next three are set with modifiers.
  Float32Places places;
  int32_t head;
  const KeyBits* bad;  // those of the head's first tile: of values that are not finite
};

// Matrices of float32 are laid out as ones of twice as many columns of 16 bits: those have the
// swizzle that wgmma reads. K and V take the slots in turn. kSplitOperands: operands are split into
// float16 (sm90/split_tiles.cuh).
template <int kHeadDimension, bool kSplitOperands>
struct Float32Config {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr bool kSplit = kSplitOperands;

  static constexpr int kConsumers = 2, kBlockQ = 64 * kConsumers;
  static constexpr int kBlockKv = Float32Tiles::keys(kHeadDim, kSplit);
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  using KeyTile = SmemTile<kBlockKv, 2 * kHeadDim>;
  // Without a split, keys are contiguous.
  using ValueTile = std::conditional_t<kSplit, KeyTile, SmemTile<kHeadDim, 2 * kBlockKv>>;
  static constexpr int kTileBytes = KeyTile::kBytes;
  static constexpr int kTileFloats = Float32Tiles::floats(kHeadDim, kSplit);  // in the workspace
  static_assert(ValueTile::kBytes == kTileBytes);

  static constexpr int kQueryStages = 2;  // of descriptions: consumers read Q themselves
  // Above head dim 128, or 64 if it is split, Q does not fit the registers beside O, and is in
  // shared memory instead.
  static constexpr bool kQueryInSmem = kHeadDim > (kSplit ? 64 : 128);
  using QueryTile = SmemTile<64, 2 * kHeadDim>;  // of a consumer
  static constexpr int kSlotsOffset = kQueryInSmem ? kConsumers * QueryTile::kBytes : 0;
  static constexpr int kStaticBytes = kSplit ? 4096 : kStaticSmemBytes;  // an upper bound
  static constexpr int kFit = (kSmemLimit - kStaticBytes - kSlotsOffset) / kTileBytes;
  static constexpr int kSlots = kFit < 8 ? kFit : 8;
  static_assert(kSlots >= 3);
  static constexpr int kSmemBytes = kSlotsOffset + kSlots * kTileBytes;
};

template <typename Config>
using Float32Barriers = TileBarriers<Config::kQueryStages, 1, Config::kSlots, Config::kConsumers>;

// Lays out static shared memory.
template <typename Config>
struct Float32Notes {
  alignas(16) Float32Keys keys[Config::kSlots];  // of slots that hold K
  Float32Work works[Config::kQueryStages];
  uint64_t barriers[Float32Barriers<Config>::kCount];
  // The magnitudes of the rows in the slots, if operands are split (ptx/split.cuh).
  alignas(16) float magnitudes[Config::kSplit ? Config::kSlots : 1][kSplitRows];
};

// Gives the addresses of a block's tiles and barriers.
template <typename Config>
struct Float32Smem : Float32Barriers<Config> {
  uint32_t root;
  Float32Keys* keys;
  Float32Work* works;
  float (*magnitudes)[kSplitRows];

  __device__ __forceinline__ Float32Smem(uint32_t tiles, Float32Notes<Config>& notes)
      : Float32Barriers<Config>(ptx::shared_address(notes.barriers)),
        root(tiles),
        keys(notes.keys),
        works(notes.works),
        magnitudes(notes.magnitudes) {}

  __device__ __forceinline__ typename Config::QueryTile query(int group) const {
    return {root, static_cast<uint32_t>(group) * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::KeyTile key(uint32_t slot) const {
    return {root, Config::kSlotsOffset + slot * Config::kTileBytes};
  }
  __device__ __forceinline__ typename Config::ValueTile value(uint32_t slot) const {
    return {root, Config::kSlotsOffset + slot * Config::kTileBytes};
  }
};

}  // namespace jax_flash::sm90
