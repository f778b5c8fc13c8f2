// Tile sizes, warp roles and shared-memory plans of the sm_90 backward kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/score_gradient_transposed.cuh"
#include "plan/backward_workspace.h"
#include "sm90/ring.cuh"
#include "tile/smem_tile.cuh"

// Switches of `python benchmarks/run.py ablation`, with what is shipped as their values.
#ifndef JAX_FLASH_SM90_BWD_BLOCK_Q
#define JAX_FLASH_SM90_BWD_BLOCK_Q (kHeadDim <= 64 ? 128 : 64)
#endif
#ifndef JAX_FLASH_SM90_BWD_KEYS_IN_REGISTERS
#define JAX_FLASH_SM90_BWD_KEYS_IN_REGISTERS (kHeadDim <= 64 && !kGeneral)
#endif
#ifndef JAX_FLASH_SM90_BWD_NEXT_SCORES_FIRST
#define JAX_FLASH_SM90_BWD_NEXT_SCORES_FIRST (kHeadDim <= 64 && !kGeneral)
#endif
#ifndef JAX_FLASH_SM90_BWD_EARLY_LSE
#define JAX_FLASH_SM90_BWD_EARLY_LSE (kHeadDim <= 64 && !kGeneral)
#endif
#ifndef JAX_FLASH_SM90_BWD_LONGEST_FIRST
#define JAX_FLASH_SM90_BWD_LONGEST_FIRST 1
#endif
#ifndef JAX_FLASH_SM90_BWD_DEPENDENT_LAUNCH
#define JAX_FLASH_SM90_BWD_DEPENDENT_LAUNCH 1
#endif

namespace jax_flash::sm90 {

inline constexpr int kBackwardSmemLimit = 227 * 1024;

// Head dims up to 128. A block owns kBlockKv keys and values, 64 for each consumer warpgroup,
// with dK and dV in its registers.
template <int kHeadDimension, bool kGeneral>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static_assert(kHeadDim % 16 == 0 && kHeadDim <= 128);
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

  static constexpr int kBlockQ = JAX_FLASH_SM90_BWD_BLOCK_Q;
  static constexpr int kBlockKv = 64 * kConsumers;
  static constexpr int kStages = 2;  // of Q, dO and dS each
  // Whether K and V are also in registers, as operands of S and dP: half the bytes these read.
  static constexpr bool kKeysInRegisters = JAX_FLASH_SM90_BWD_KEYS_IN_REGISTERS;
  // Whether consumers compute exponentials one after the other.
  static constexpr bool kAlternates = !kGeneral;
  // What runs side by side where there are registers for both: dS is computed beside dV, P beside
  // dQ of the tile before, and the next tile's S starts before the last dK is done.
  static constexpr bool kEarlyDvalue = !kGeneral;
  static constexpr bool kEarlyDquery = kHeadDim <= (kGeneral ? 64 : 96) && !kAlternates;
  static constexpr bool kNextScoresFirst = JAX_FLASH_SM90_BWD_NEXT_SCORES_FIRST;
  // lse before S is there, where there are registers for it.
  using LseColumns =
      std::conditional_t<JAX_FLASH_SM90_BWD_EARLY_LSE, ColumnsInRegisters<8>, ColumnsInShared>;

  // dQ [kBlockQ, kDqueryCols]: warpgroups divide its rows if there are 128, else its columns.
  static constexpr int kDqueryCols = (kHeadDim + 63) / 64 * 64;
  static constexpr bool kDqueryByRows = kBlockQ == 128;
  static constexpr int kDqueryGroupCols = kDqueryByRows ? kDqueryCols : kDqueryCols / kConsumers;
  static constexpr int kStagingBytes = 64 * kDqueryGroupCols * 4;
  static_assert(kBlockQ % 64 == 0 && kDqueryGroupCols == 64);
  // Sums that blocks which take turns add to, those of even and of odd key tiles one each: with
  // tiles of 128 rows and keys, the next to add to a tile would come just one tile later, and all
  // would run in lockstep.
  static constexpr int kOrderedSums = kDqueryByRows ? 2 : 1;
  static_assert(kOrderedSums == 1 || kHeadDim <= kTwoSumsHeadDim);

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ScoreTile = SmemTile<kBlockKv, kBlockQ>;  // dS^T
  using GradientTile = SmemTile<64, kHeadDim>;    // dK or dV of a warpgroup, where dQ has been
  static_assert(GradientTile::kBytes <= kStagingBytes);

  // Shared memory: K, V, kStages times Q, dO and dS^T, two stages of dQ of each consumer.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + KeyTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = kOutOffset + kStages * QueryTile::kBytes;
  static constexpr int kStagingOffset = kScoreOffset + kStages * ScoreTile::kBytes;
  static constexpr int kSmemBytes = kStagingOffset + 2 * kConsumers * kStagingBytes;
  static constexpr int kStagingArrivals = 1;
  static constexpr int kStaticSmemBytes = 3072;  // row statistics, barriers, alignment, at most
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
};

// Head dims above 128: two kernels. Of the first a block owns 64 keys and values; one consumer
// warpgroup computes S and holds dV, the other computes dP and holds dK.
template <int kHeadDimension>
struct WideKeyConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256);
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kBlockQ = 64, kBlockKv = 64;
  static constexpr int kStages = 2;  // of Q, dO and P^T each

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;

  // Shared memory: K, V, kStages times Q, dO and P^T, the latter in float32 and fragment order.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + KeyTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = 0;  // none
  static constexpr int kStagingOffset = kOutOffset + kStages * QueryTile::kBytes;
  static constexpr int kStagingBytes = kBlockQ * kBlockKv * 4;
  static constexpr int kSmemBytes = kStagingOffset + kStages * kStagingBytes;
  static constexpr int kStagingArrivals = 4 * kWarpArrivals;
  static constexpr int kStaticSmemBytes = 2048;  // row statistics, barriers, at most
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
  using ScoreTile = KeyTile;
};

// Of the second, 64 query rows for each consumer warpgroup, with dQ in its registers.
template <int kHeadDimension>
struct WideQueryConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kBlockQ = 64 * kConsumers, kBlockKv = 64;
  static constexpr int kKeyStages = kHeadDim > 192 ? 2 : 3, kValueStages = kHeadDim > 192 ? 1 : 2;

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;

  // Shared memory: Q, dO, kKeyStages times K, kValueStages times V.
  static constexpr int kOutOffset = QueryTile::kBytes;
  static constexpr int kKeyOffset = kOutOffset + QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * KeyTile::kBytes;
  static constexpr int kSmemBytes = kValueOffset + kValueStages * KeyTile::kBytes;
  static constexpr int kStaticSmemBytes = 1024;
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
};

}  // namespace jax_flash::sm90
