// Defines tile sizes and the shared-memory plan of the FP8 forward kernel.
#pragma once

#include <cstdint>

#include "plan/float8.h"
#include "ptx/shared.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/tile_barriers.cuh"
#include "tile/band.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm90 {

// Describes a query tile. The producer warp writes it for consumers.
struct Float8Work {
  void* out;  // points to the tile's first row
  float* lse;
  Band band;
  Range tiles;    // key tiles, at least one
  int32_t row0;   // negative: there is no more work
  float to_log2;  // from products of query and stored key to logits in log2 units
  float sink_log2;
  float greatest;        // the head's greatest scale of V
  SegmentSpan segments;  // those of its rows, if the call has segments
  const int32_t* query_ids;
  const int32_t* key_ids;
  const SegmentSpan* key_spans;
};

// kGeneral: the kernel for segments and a soft cap.
template <int kHeadDimension, int kValueDimension, bool kIsGeneral>
struct Float8Config {
  static constexpr int kHeadDim = kHeadDimension, kValueDim = kValueDimension;
  static constexpr bool kGeneral = kIsGeneral;
  // True if tiles that the band does not cut have a loop of their own. With more columns of V, this
  // loop would take more registers than there are.
  static constexpr bool kHasPlainTiles = !kGeneral && kValueDim <= 128;
  static constexpr int kConsumers = 2, kBlockQ = 64 * kConsumers, kBlockKv = kScaleBlock;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = kValueDim > 192 ? 24 : 40;
  static constexpr int kConsumerRegisters = kValueDim > 192 ? 240 : 232;

  using QueryTile = SmemTile<64, kHeadDim, 1>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim, 1>;
  using ValueTile = SmemTile<kValueDim, kBlockKv, 1>;  // keys contiguous
  static constexpr int kKeySteps = kHeadDim / 32, kValueSteps = kBlockKv / 32;

  static constexpr int kQueryStages = 2;
  static constexpr int kKeyOffset = kQueryStages * kConsumers * QueryTile::kBytes;
  static constexpr int kFit =
      (kSmemLimit - kStaticSmemBytes - kKeyOffset) / (KeyTile::kBytes + ValueTile::kBytes);
  static constexpr int kStages = kFit < 6 ? kFit : 6;
  static_assert(kStages >= 2);
  static constexpr int kValueOffset = kKeyOffset + kStages * KeyTile::kBytes;
  static constexpr int kSmemBytes = kValueOffset + kStages * ValueTile::kBytes;
};

// K and V have a ring of stages each.
template <typename Config>
using Float8Barriers = TileBarriers<Config::kQueryStages, 2, Config::kStages, Config::kConsumers>;

// Lays out static shared memory.
template <typename Config>
struct Float8Notes {
  alignas(16) KeyFactors factors[Config::kStages];  // they arrive with the keys
  Float8Work works[Config::kQueryStages];
  uint64_t barriers[Float8Barriers<Config>::kCount];
};

// Gives the addresses of a block's tiles and barriers.
template <typename Config>
struct Float8Smem : Float8Barriers<Config> {
  uint32_t root, factors;
  Float8Work* works;

  __device__ __forceinline__ Float8Smem(uint32_t tiles, Float8Notes<Config>& notes)
      : Float8Barriers<Config>(ptx::shared_address(notes.barriers)),
        root(tiles),
        factors(ptx::shared_address(notes.factors)),
        works(notes.works) {}

  __device__ __forceinline__ typename Config::QueryTile query(uint32_t stage, int group) const {
    return {root, (stage * Config::kConsumers + group) * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::KeyTile key(uint32_t stage) const {
    return {root, Config::kKeyOffset + stage * Config::KeyTile::kBytes};
  }
  __device__ __forceinline__ typename Config::ValueTile value(uint32_t stage) const {
    return {root, Config::kValueOffset + stage * Config::ValueTile::kBytes};
  }
  __device__ __forceinline__ uint32_t key_full(uint32_t stage) const { return this->full(stage); }
  __device__ __forceinline__ uint32_t key_empty(uint32_t stage) const { return this->empty(stage); }
  __device__ __forceinline__ uint32_t value_full(uint32_t stage) const {
    return this->full(stage, 1);
  }
  __device__ __forceinline__ uint32_t value_empty(uint32_t stage) const {
    return this->empty(stage, 1);
  }
  __device__ __forceinline__ uint32_t factors_of(uint32_t stage) const {
    return factors + stage * static_cast<uint32_t>(sizeof(KeyFactors));
  }
};

}  // namespace jax_flash::sm90
