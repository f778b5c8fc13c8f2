// Lays out the shared memory of a backward kernel whose thread blocks own keys, and numbers its
// barriers.
//
// A proxy fence orders ordinary accesses to shared memory and those of copies and products. It is
// executed by the thread that starts the copies or products, after the barrier that orders both
// sides: the memory model asks for one fence on the way, in the same thread block (Lustig, Cooksey,
// Giroux, ISCA 2022). Code often has the fence in front of the barrier instead. There, all threads
// would wait for their own accesses: 600 clocks a tile.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/ring.cuh"

namespace jax_flash::sm90 {

// Holds the state of a ring of two stages in one register.
struct StagePair {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count & 1; }
  __device__ __forceinline__ uint32_t parity() const { return count >> 1 & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

struct BackwardBlock;

// Holds the addresses of tiles, row statistics and barriers in shared memory.
template <typename Config>
struct BackwardSmem {
  uint32_t root;      // base of the tiles
  uint32_t barriers;  // four single ones; then two or kStages of each kind
  float* lse;         // [kStages][kBlockQ]
  float* delta;       // [kStages][kBlockQ]
  int2* tiles;        // [kStages]: a tile's first row and its head; if there is a single key block,
                      // a row of -1 after the last tile
  BackwardBlock* blocks;  // [2], or [1] if there is a single one

  __device__ __forceinline__ typename Config::KeyTile key() const { return {root, 0}; }
  __device__ __forceinline__ typename Config::ValueTile value() const {
    return {root, Config::kValueOffset};
  }
  __device__ __forceinline__ typename Config::QueryTile query(uint32_t stage) const {
    return {root, Config::kQueryOffset + stage * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::OutTile dout(uint32_t stage) const {
    return {root, Config::kOutOffset + stage * Config::OutTile::kBytes};
  }
  __device__ __forceinline__ typename Config::ScoreTile score(uint32_t stage) const {
    return {root, Config::kScoreOffset + stage * Config::ScoreTile::kBytes};
  }
  // Returns the address of staged accumulators: dQ of a warpgroup, or P^T of a stage.
  __device__ __forceinline__ uint32_t staging(int index) const {
    return root + Config::kStagingOffset + index * Config::kStagingBytes;
  }
  // Returns the address of a consumer's dQ of a tile with this stage of Q.
  __device__ __forceinline__ uint32_t dquery_staging(int group, uint32_t stage) const {
    return Config::kStagingStages == 1 ? staging(group) : staging(group * 2 + stage);
  }
  // Returns the address of 64 query rows of a bias.
  __device__ __forceinline__ uint32_t bias(uint32_t stage) const {
    return root + Config::kBiasOffset + stage * Config::kBiasStageBytes;
  }
  __device__ __forceinline__ uint32_t key_full() const { return barriers; }
  __device__ __forceinline__ uint32_t value_full() const { return barriers + 8; }
  __device__ __forceinline__ uint32_t keys_empty() const { return barriers + 16; }  // and values
  // Signals that the next block may be chosen.
  __device__ __forceinline__ uint32_t block_wanted() const { return barriers + 24; }
  __device__ __forceinline__ uint32_t block_full(uint32_t stage) const {
    return barriers + 32 + stage * 8;
  }
  __device__ __forceinline__ uint32_t block_empty(uint32_t stage) const {
    return barriers + 48 + stage * 8;
  }
  __device__ __forceinline__ uint32_t query_full(uint32_t stage) const { return at(0, stage); }
  __device__ __forceinline__ uint32_t query_empty(uint32_t stage) const { return at(1, stage); }
  __device__ __forceinline__ uint32_t dout_full(uint32_t stage) const { return at(2, stage); }
  __device__ __forceinline__ uint32_t dout_empty(uint32_t stage) const { return at(3, stage); }

  // Completes when staged dQ has been copied; a consumer has two stages of it, or two pieces. Only
  // the kernel of narrow.cuh has these barriers. That of wide_key.cuh has the two kinds that follow
  // instead.
  __device__ __forceinline__ uint32_t dquery_empty(int group, uint32_t stage) const {
    return at(4 + group, stage);
  }
  // Completes when one consumer has staged P^T for the other (wide_key.cuh).
  __device__ __forceinline__ uint32_t staging_full(uint32_t stage) const { return at(4, stage); }
  __device__ __forceinline__ uint32_t staging_empty(uint32_t stage) const { return at(5, stage); }

  // Only kernels for a bias have these.
  __device__ __forceinline__ uint32_t bias_full(uint32_t stage) const { return at(6, stage); }
  __device__ __forceinline__ uint32_t bias_empty(uint32_t stage) const { return at(7, stage); }

  static constexpr int kBarriers = 8 + (Config::kHasBias ? 8 : 6) * Config::kStages;
  // Initializes all barriers. One thread of a warp does it: several lanes take longer.
  __device__ __forceinline__ void init_barriers() const {
    constexpr int kConsumerArrivals = Config::kConsumers * 4 * kWarpArrivals;
    if (threadIdx.x % 32 != 0) return;
#pragma unroll
    for (int index = 0; index < kBarriers; ++index) {
      const int kind = (index - 8) / Config::kStages;
      int arrivals = 1;
      if (index == 2) arrivals = kConsumerArrivals;
      // The producer warp and the two warps that add dQ arrive, too.
      if (index == 6 || index == 7) arrivals = kConsumerArrivals + 3 * kWarpArrivals;
      if (index >= 8 && (kind == 1 || kind == 3 || kind == 7)) arrivals = kConsumerArrivals;
      if (index >= 8 && (kind == 4 || kind == 5)) arrivals = Config::kStagingArrivals;
      ptx::mbarrier_init(barriers + index * 8, arrivals);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ uint32_t at(uint32_t kind, uint32_t stage) const {
    return barriers + 64 + (kind * Config::kStages + stage) * 8;
  }
};

// Numbers the named barriers.
//   kScoresStored    each consumer notifies the other that its dS^T is stored; two alternate
//   kBackwardZeroed  synchronizes one consumer
//   kDqueryFull      each consumer notifies the warp that adds its dQ; two alternate
//   kConsumers       synchronizes both consumers
//   kMayCompute      each consumer lets the other compute exponentials
enum BackwardBarrier : int {
  kScoresStored = 1,
  kBackwardZeroed = 5,
  kDqueryFull = 7,
  kConsumers = 11,
  kMayCompute = 12
};

}  // namespace jax_flash::sm90
