// Defines tile sizes, warp roles and shared-memory layouts of the sm_90 backward kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/score_gradient_transposed.cuh"
#include "plan/backward_workspace.h"
#include "plan/modifiers.h"
#include "sm90/ring.cuh"
#include "tile/smem_tile.cuh"

// Switches of `python benchmarks/run.py ablation`; their defaults are what is shipped.
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

// Configures the kernel for head dims up to 128, and up to 192 with values of at most 128 columns.
// A block owns kBlockKv keys and values, 64 for each consumer warpgroup, and keeps their dK and dV
// in registers. kOnly: the only modifier, if there is one and the kernel is made for it.
template <int kHeadDimension, bool kGeneral, uint32_t kOnly = kNoModifier>
struct BackwardConfig {
  static constexpr uint32_t kModifier = kOnly;
  static constexpr bool kHasSlopes = kOnly == kDistance;  // ALiBi
  static constexpr bool kHasSegments = kOnly == kSegments;
  static constexpr bool kHasSoftCap = kOnly == kSoftCap;
  static constexpr bool kHasMask = kOnly == kMask;
  static constexpr bool kHasBias = kOnly == kBias;
  static constexpr bool kHasDropout = kOnly == kDropout;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kValueDim = kHeadDim <= 128 ? kHeadDim : kOneKernelValueDim;
  static_assert(kHeadDim % 16 == 0 && (kHeadDim <= 128 || kHeadDim == kOneKernelHeadDim));
  // True if dK leaves so few registers and so little shared memory that a consumer computes dP and
  // dQ in pieces: see sm90/backward/pieces_consumer.cuh.
  static constexpr bool kInPieces = kHeadDim > 128;
  static_assert(!(kInPieces && (kGeneral || kOnly != kNoModifier)));
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kProducerRegisters = kInPieces ? 24 : 40;
  static constexpr int kConsumerRegisters = kInPieces ? 240 : 232;

  static constexpr int kBlockQ = JAX_FLASH_SM90_BWD_BLOCK_Q;
  static constexpr int kBlockKv = 64 * kConsumers;
  static constexpr int kStages = 2;  // for each of Q, dO and dS
  // True if K and V are also in registers, as operands of S and dP: this halves the bytes that the
  // two products read from shared memory.
  static constexpr bool kKeysInRegisters = JAX_FLASH_SM90_BWD_KEYS_IN_REGISTERS;
  // True if the consumers compute their exponentials one after the other.
  static constexpr bool kAlternates = !kGeneral;
  // These orders overlap work if there are registers for both sides: dS is computed while dV runs,
  // P while dQ of the tile before runs, and the next tile's S starts before the last dK is
  // complete.
  static constexpr bool kEarlyDvalue = !kGeneral;
  static constexpr bool kEarlyDquery = kHeadDim <= (kGeneral ? 64 : 96) && !kAlternates;
  static constexpr bool kNextScoresFirst = JAX_FLASH_SM90_BWD_NEXT_SCORES_FIRST;
  // Loads lse before S is complete, if there are registers for it.
  using LseColumns =
      std::conditional_t<JAX_FLASH_SM90_BWD_EARLY_LSE, ColumnsInRegisters<8>, ColumnsInShared>;

  // dQ is [kBlockQ, kDqueryCols]. The warpgroups divide its rows if there are 128, else its
  // columns: each has 64, and half of the next 64 if it has two pieces.
  static constexpr int kDqueryCols = (kHeadDim + 63) / 64 * 64;
  static constexpr bool kDqueryByRows = kBlockQ == 128;
  static constexpr int kDqueryGroupCols = kDqueryByRows ? kDqueryCols : 64;
  static_assert(kDqueryCols == kDqueryGroupCols * (kDqueryByRows ? 1 : kInPieces ? 3 : kConsumers));
  static constexpr int kStagingBytes = 64 * kDqueryGroupCols * 4;
  static constexpr int kStagingStages = kInPieces ? 1 : 2;  // for each consumer
  static_assert(kBlockQ % 64 == 0 && kDqueryGroupCols == 64);
  // Number of sums in ordered runs: even and odd key tiles have one each if tiles have 128 rows and
  // 128 keys. With a single sum, the next block to add to a tile would come just one tile later,
  // and all blocks would run in lockstep.
  static constexpr int kOrderedSums = kDqueryByRows ? 2 : 1;
  static_assert(kOrderedSums == 1 || kHeadDim <= kTwoSumsHeadDim);

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using OutTile = SmemTile<kBlockQ, kValueDim>;  // dO
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = SmemTile<kBlockKv, kValueDim>;
  using ScoreTile = SmemTile<kBlockKv, kBlockQ>;  // dS^T
  // dK or dV of a warpgroup, staged in dQ's place; or one of two panels of it.
  using GradientTile = SmemTile<64, kInPieces ? 64 : kHeadDim>;
  static_assert(GradientTile::kBytes * (kInPieces ? 2 : 1) <= kStagingBytes);

  // Shared memory holds K, V, kStages times Q, dO and dS^T, and kStagingStages times dQ of each
  // consumer.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kStagingOffset = kScoreOffset + kStages * ScoreTile::kBytes;
  static constexpr int kSmemBytes = kStagingOffset + kStagingStages * kConsumers * kStagingBytes;
  static constexpr int kStagingArrivals = 1;
  static constexpr int kStaticSmemBytes = 3072;  // most for row statistics, barriers, alignment
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
};

// Configures the first of the two kernels for head dims above 128. A block owns 64 keys and values;
// one consumer warpgroup computes S and holds dV, the other computes dP and holds dK.
template <int kHeadDimension>
struct WideKeyConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static_assert(kHeadDim % 64 == 0 && kHeadDim <= 256);
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kBlockQ = 64, kBlockKv = 64;
  static constexpr int kStages = 2;  // for each of Q, dO and P^T

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using OutTile = QueryTile;
  using ValueTile = KeyTile;

  // Shared memory holds K, V, and kStages times Q, dO and P^T; P^T is float32, in fragment order.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + KeyTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = 0;  // none
  static constexpr int kStagingOffset = kOutOffset + kStages * QueryTile::kBytes;
  static constexpr int kStagingBytes = kBlockQ * kBlockKv * 4;
  static constexpr int kSmemBytes = kStagingOffset + kStages * kStagingBytes;
  static constexpr int kStagingArrivals = 4 * kWarpArrivals;
  static constexpr int kStaticSmemBytes = 2048;  // most for row statistics, barriers
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
  using ScoreTile = KeyTile;
};

// Configures the second of the two kernels: each consumer warpgroup owns 64 query rows, and keeps
// their dQ in registers.
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

  // Shared memory holds Q, dO, kKeyStages times K, and kValueStages times V.
  static constexpr int kOutOffset = QueryTile::kBytes;
  static constexpr int kKeyOffset = kOutOffset + QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * KeyTile::kBytes;
  static constexpr int kSmemBytes = kValueOffset + kValueStages * KeyTile::kBytes;
  static constexpr int kStaticSmemBytes = 1024;
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
};

}  // namespace jax_flash::sm90
