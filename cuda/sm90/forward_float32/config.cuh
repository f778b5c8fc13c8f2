// Defines tile sizes and the shared-memory plan of Hopper's forward kernel for float32.
#pragma once

#include <cstdint>

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
  Float32Places places;
  int32_t head;
  const KeyBits* bad;  // those of the head's first tile: of values that are not finite
};

// K and V take the slots in turn. A slot holds all keys of a step. kNumberCount: the number of
// float16 numbers that stand for one of an operand (ptx/split.cuh).
template <int kHeadDimension, int kNumberCount, int kKeys = kTileRows>
struct Float32Config {
  static constexpr int kHeadDim = kHeadDimension, kNumbers = kNumberCount;

  static constexpr int kConsumers = 2, kBlockQ = 64 * kConsumers;
  static constexpr int kBlockKv = kKeys, kTiles = kKeys / kTileRows;  // of a step
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  using Tile = SmemTile<kBlockKv, kNumbers * kHeadDim>;  // of K or V, in a slot
  static constexpr int kTileBytes = Tile::kBytes;
  static constexpr int kTileFloats = tile_floats(kHeadDim, kNumbers);  // in the workspace

  static constexpr int kQueryStages = 2;  // of descriptions: consumers read Q themselves
  // Above, Q does not fit the registers beside O, and is in shared memory instead.
  static constexpr bool kQueryInSmem = kNumbers * kHeadDim > 128;
  using QueryTile = SmemTile<64, kNumbers * kHeadDim>;  // of a consumer
  static constexpr int kSlotsOffset = kQueryInSmem ? kConsumers * QueryTile::kBytes : 0;
  static constexpr int kStaticBytes = 6144;  // an upper bound
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
  Float32Keys<Config::kTiles> keys[Config::kSlots];  // of slots that hold K
  Float32Work works[Config::kQueryStages];
  uint64_t barriers[Float32Barriers<Config>::kCount];
  alignas(16) float magnitudes[Config::kSlots][Config::kBlockKv];  // of the rows in the slots
};

// Gives the addresses of a block's tiles and barriers.
template <typename Config>
struct Float32Smem : Float32Barriers<Config> {
  uint32_t root;
  Float32Keys<Config::kTiles>* keys;
  Float32Work* works;
  float (*magnitudes)[Config::kBlockKv];

  __device__ __forceinline__ Float32Smem(uint32_t tiles, Float32Notes<Config>& notes)
      : Float32Barriers<Config>(ptx::shared_address(notes.barriers)),
        root(tiles),
        keys(notes.keys),
        works(notes.works),
        magnitudes(notes.magnitudes) {}

  __device__ __forceinline__ typename Config::QueryTile query(int group) const {
    return {root, static_cast<uint32_t>(group) * Config::QueryTile::kBytes};
  }
  // Returns the tile of K or V in a slot.
  __device__ __forceinline__ typename Config::Tile tile(uint32_t slot) const {
    return {root, Config::kSlotsOffset + slot * Config::kTileBytes};
  }
};

}  // namespace jax_flash::sm90
