// Defines tile sizes, warp roles and shared-memory layouts of the sm_90 backward kernels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/score_gradient_transposed.cuh"
#include "plan/backward_workspace.h"
#include "plan/modifiers.h"
#include "sm90/ring.cuh"
#include "tile/smem_tile.cuh"

// Switches of `python benchmarks/run.py ablation`. The library is built with the defaults.
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

namespace jax_flash::sm90 {

inline constexpr int kBackwardSmemLimit = 227 * 1024;

// Tells the end and rest kernels (edges.cuh) how the sums for dQ are laid out: their columns; in
// ordered runs, the flags of a tile of 64 rows and the number of sums.
template <int kColumns, int kFlags, int kSums>
struct DqueryLayout {
  static constexpr int kCols = kColumns, kTileFlags = kFlags, kOrderedSums = kSums;
};

// Configures the kernel for head dims up to 128, and up to 192 with values of at most 128 columns
// (sm90/backward/narrow.cuh). A thread block owns kBlockKv keys and values, 64 for each consumer
// warpgroup, and keeps their dK and dV in registers. kOnly: the modifiers that the kernel is
// compiled for, if not for all of them; kBytesOfBias: bytes of an element of the bias among them
// (sm90/backward/bias.cuh); kMaskOfKeys: all queries share the mask among them. kGeneral: the
// kernel takes all modifiers.
template <int kHeadDimension, bool kGeneral, uint32_t kOnly = kNoModifier, int kBytesOfBias = 0,
          bool kMaskOfKeys = false>
struct BackwardConfig {
  static constexpr uint32_t kModifier = kOnly;
  static constexpr bool kHasSlopes = (kOnly & kDistance) != 0;  // ALiBi
  static constexpr bool kHasSegments = (kOnly & kSegments) != 0;
  static constexpr bool kHasSoftCap = (kOnly & kSoftCap) != 0;
  static constexpr bool kHasKeyMask = kMaskOfKeys;
  static constexpr bool kHasMask = (kOnly & kMask) != 0 && !kHasKeyMask;
  static constexpr bool kSkipsByMask = kGeneral || kHasMask || kHasKeyMask;
  static constexpr bool kHasBias = (kOnly & kBias) != 0;
  static constexpr int kBiasBytes = kBytesOfBias;
  static_assert(kHasBias == (kBiasBytes != 0));
  static constexpr bool kHasDropout = (kOnly & kDropout) != 0;
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

  static constexpr int kBlockQ = kHeadDim <= 64 ? 128 : 64;
  static constexpr int kBlockKv = 64 * kConsumers;
  static constexpr int kStages = 2;  // for each of Q, dO and dS
  // True if consumers also hold K and V in registers, as operands of S and dP: this halves the
  // bytes that the two products read from shared memory.
  static constexpr bool kKeysInRegisters = JAX_FLASH_SM90_BWD_KEYS_IN_REGISTERS;
  // Each of these orders overlaps work, but needs registers for both sides: dS is computed while dV
  // runs, P while dQ of the tile before runs, and S of the next tile starts before the last dK is
  // complete. With kEarlyDvalue, the consumers compute their exponentials in turn, each while the
  // other's products run.
  static constexpr bool kEarlyDvalue = !kGeneral;
  static constexpr bool kEarlyDquery = kGeneral && kHeadDim <= 64;
  static constexpr bool kNextScoresFirst = JAX_FLASH_SM90_BWD_NEXT_SCORES_FIRST;
  // In registers, lse can be loaded before S is complete.
  using LseColumns =
      std::conditional_t<JAX_FLASH_SM90_BWD_EARLY_LSE, ColumnsInRegisters<8>, ColumnsInShared>;

  // dQ is [kBlockQ, kDqueryCols]. If it has 128 rows, each warpgroup has 64 of them; else each has
  // 64 columns, and, if it computes dQ in two pieces, half of the 64 columns after those of both.
  static constexpr int kDqueryCols = (kHeadDim + 63) / 64 * 64;
  static constexpr bool kDqueryByRows = kBlockQ == 128;
  static constexpr int kDqueryGroupCols = kDqueryByRows ? kDqueryCols : 64;
  static_assert(kDqueryCols == kDqueryGroupCols * (kDqueryByRows ? 1 : kInPieces ? 3 : kConsumers));
  static constexpr int kStagingBytes = 64 * kDqueryGroupCols * 4;
  // For each consumer. A bias has the place of the second one.
  static constexpr int kStagingStages = kInPieces || kHasBias ? 1 : 2;
  // True if a consumer writes dV and dK one after the other, in panels of 64 columns.
  static constexpr bool kWritesPanels = kStagingStages == 1;
  static_assert(kBlockQ % 64 == 0 && kDqueryGroupCols == 64);
  // Number of sums for dQ in ordered runs. If tiles have 128 rows and 128 keys, even and odd key
  // tiles have separate sums. With a single sum, the next block to add to a tile would reach it
  // just one tile later, and all blocks would run in lockstep.
  static constexpr int kOrderedSums = kDqueryByRows ? 2 : 1;
  static_assert(kOrderedSums == 1 || kHeadDim <= kTwoSumsHeadDim);
  using Layout = DqueryLayout<kDqueryCols, kDqueryByRows ? 1 : kConsumers, kOrderedSums>;

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using OutTile = SmemTile<kBlockQ, kValueDim>;  // dO
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = SmemTile<kBlockKv, kValueDim>;
  using ScoreTile = SmemTile<kBlockKv, kBlockQ>;  // dS^T
  // A warpgroup's dK or dV, or one of two panels of it, staged in the memory of dQ.
  using GradientTile = SmemTile<64, kWritesPanels ? 64 : kHeadDim>;
  static_assert(GradientTile::kBytes * (kWritesPanels ? 2 : 1) <= kStagingBytes);

  // Shared memory holds K, V, kStages each of Q, dO and dS^T, kStagingStages of each consumer's dQ,
  // and kBiasStages of 64 query rows of a bias.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kStagingOffset = kScoreOffset + kStages * ScoreTile::kBytes;
  static constexpr int kBiasOffset = kStagingOffset + kStagingStages * kConsumers * kStagingBytes;
  static constexpr int kBiasStages = kBiasBytes == 4 ? 1 : 2;
  static constexpr int kBiasStageBytes = 64 * kBlockKv * kBiasBytes;
  static constexpr int kSmemBytes = kBiasOffset + kBiasStages * kBiasStageBytes;
  static constexpr int kStagingArrivals = 1;
  static constexpr int kStaticSmemBytes = 3072;  // bound for row statistics, barriers, alignment
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
};

// Configures the first of the two kernels for head dims above 128 (sm90/backward/wide_key.cuh). A
// block owns 64 keys and values. One consumer warpgroup computes S and holds dV, the other computes
// dP and holds dK.
template <int kHeadDimension>
struct WideKeyConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr bool kHasBias = false;
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

  // Shared memory holds K, V, and kStages each of Q, dO and P^T. P^T is float32, in fragment order.
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kQueryOffset = kValueOffset + KeyTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kScoreOffset = 0;  // none
  static constexpr int kStagingOffset = kOutOffset + kStages * QueryTile::kBytes;
  static constexpr int kStagingBytes = kBlockQ * kBlockKv * 4;
  static constexpr int kSmemBytes = kStagingOffset + kStages * kStagingBytes;
  static constexpr int kStagingArrivals = 4 * kWarpArrivals;
  static constexpr int kStaticSmemBytes = 2048;  // bound for row statistics, barriers
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
  using ScoreTile = KeyTile;
};

// Configures the second of the two kernels (sm90/backward/wide_query.cuh): each consumer warpgroup
// owns 64 query rows, and keeps their dQ in registers.
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

  // Shared memory holds Q, dO, kKeyStages of K, and kValueStages of V.
  static constexpr int kOutOffset = QueryTile::kBytes;
  static constexpr int kKeyOffset = kOutOffset + QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kKeyStages * KeyTile::kBytes;
  static constexpr int kSmemBytes = kValueOffset + kValueStages * KeyTile::kBytes;
  static constexpr int kStaticSmemBytes = 1024;
  static_assert(kSmemBytes + kStaticSmemBytes <= kBackwardSmemLimit);
};

}  // namespace jax_flash::sm90
