// Tile sizes, warp roles and shared-memory plans of the sm_90 forward kernel.
#pragma once

#include <cstdint>

#include "plan/recipes.h"
#include "tile/smem_tile.cuh"

// Switches of `python benchmarks/run.py ablation`, with what is shipped as their values; more of
// them: plan/recipes.h.
#ifndef JAX_FLASH_SM90_CONVERT_VALUES
#define JAX_FLASH_SM90_CONVERT_VALUES 1
#endif
#ifndef JAX_FLASH_SM90_OUT_PARTS_64
#define JAX_FLASH_SM90_OUT_PARTS_64 2
#endif
#ifndef JAX_FLASH_SM90_OUT_PARTS
#define JAX_FLASH_SM90_OUT_PARTS 1
#endif
#ifndef JAX_FLASH_SM90_PAIRED
#define JAX_FLASH_SM90_PAIRED 1
#endif
// Keys times head dim from which on a unit of work is a block of its own.
#ifndef JAX_FLASH_SM90_LONG_UNIT
#define JAX_FLASH_SM90_LONG_UNIT (32768 * 256)
#endif
// Whether units beyond the same number for all blocks are blocks of their own.
#ifndef JAX_FLASH_SM90_REST_APART
#define JAX_FLASH_SM90_REST_APART 1
#endif

namespace jax_flash::sm90 {

inline constexpr int kSmemLimit = 227 * 1024;
inline constexpr int kStaticSmemBytes = 2048;  // barriers, work, at most
// Of a thread's probabilities in a row of a tile, relative to the row's reference: safe in float16.
inline constexpr float kOptimisticLimit = 1024.0f;
// The same where P is float16 beside Q and K of bfloat16 (plan/half_values.h); log2 of P of a logit
// that is the reference; and by how much one that is compared with it may be above it, in log2
// units.
inline constexpr float kHalfSumLimit = 0x1p15f;
inline constexpr int kHalfLift = 9;
inline constexpr float kHalfSlack = 5.0f;
inline constexpr int kWarpgroup = 128;  // threads

// A block has one warpgroup whose warps start the copies, and kConsumerGroups that compute 64 rows
// of the output each. It walks over tiles of kBlockKvRows keys and values.
//
// With two kKeyShares, both consumers have the same 64 rows, and divide the tiles. There are
// kFewerValues stages of V less than of K.
template <int kHeadDimension, int kValueDimension, int kConsumerGroups, int kBlockKvRows,
          int kKeyShares = 1, ScoresAhead kAhead = ScoresAhead::kNo,
          BiasPlace kBias = BiasPlace::kNone, int kFewerValues = 0, bool kHasMaskWords = false>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimension, kValueDim = kValueDimension;
  static constexpr int kConsumers = kConsumerGroups;
  static constexpr int kKeyGroups = kKeyShares, kRowGroups = kConsumers / kKeyGroups;
  static_assert(kKeyGroups == 1 || (kKeyGroups == 2 && kConsumers == 2));
  static constexpr int kBlockQ = 64 * kRowGroups, kBlockKv = kBlockKvRows;
  static constexpr bool kScoresAhead = kAhead != ScoresAhead::kNo;
  static constexpr bool kSecondCut = kAhead == ScoresAhead::kTwoCut;
  // For short calls: query tiles say if they are a block's last, so that consumers need not wait
  // for another one; and the code of producers stands first.
  static constexpr bool kTellsLast = kScoresAhead && !kSecondCut, kProducersFirst = kTellsLast;
  // In how many parts P V is started, among exponentials.
  static constexpr int kOutParts =
      kHeadDim <= 64 ? JAX_FLASH_SM90_OUT_PARTS_64 : JAX_FLASH_SM90_OUT_PARTS;
  static_assert(kHeadDim % 16 == 0 && kValueDim % 16 == 0 && kBlockKv % 16 == 0);
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  // The register file, divided at run time: the kernel starts with an even share.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

  // Each consumer's rows of Q are a tile with barriers of its own, so that none waits for another.
  using QueryTile = SmemTile<64, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = SmemTile<kBlockKv, kValueDim>;

  // Shared memory: kQueryStages times kRowGroups query, kStages times key, kValueStages times
  // value; one consumer's output in float32 for the other one, and statistics. A second place for Q
  // where there is room: else the next Q is fetched when the last scores of this one are done.
  static constexpr int kQueryStages = kHeadDim <= 64 ? JAX_FLASH_SM90_QUERY_STAGES : 1;
  static constexpr int kPartialBytes = kKeyGroups > 1 ? 64 * kValueDim * 4 + kWarpgroup * 16 : 0;
  static constexpr bool kMaskWords = kHasMaskWords;  // of a mask: not its bytes (plan/mask_words.h)
  static constexpr bool kBiasInScores = kBias == BiasPlace::kInScores;
  // Copied for a consumer's warps in common.
  static constexpr bool kBiasBoxes = kBias == BiasPlace::kBoxes || kBiasInScores;
  // Of a warp, 16 rows of a tile.
  static constexpr int kOwnBytes = kBias == BiasPlace::kFloats  ? 16 * kBlockKv * 4
                                   : kBias == BiasPlace::kBoxes ? 16 * kBlockKv * 2
                                   : kBiasInScores              ? (kBlockKv + 63) / 64 * 64 * 16 * 2
                                                                : 0;
  static constexpr int kFree = kSmemLimit - kStaticSmemBytes -
                               kQueryStages * kRowGroups * QueryTile::kBytes - kPartialBytes -
                               kConsumers * 4 * kOwnBytes;
  static constexpr int kFit =
      (kFree + kFewerValues * ValueTile::kBytes) / (KeyTile::kBytes + ValueTile::kBytes);
  // Two warpgroups that each keep a tile's keys beside those of the next one need more.
  static constexpr int kMostStages = JAX_FLASH_SM90_STAGES + (kScoresAhead ? kKeyGroups - 1 : 0);
  static constexpr int kStages = kFit < kMostStages ? kFit : kMostStages;
  static constexpr int kValueStages = kStages > 2 ? kStages - kFewerValues : kStages;
  static_assert(kValueStages >= 2 && (kKeyGroups == 1 || (kStages >= 4 && kQueryStages > 1)));
  // Whether, after a query tile's first key tile, the exponentials are computed without looking
  // for greater scores first: a sum beyond kOptimisticLimit tells of one, and the tile is done
  // again. Keys are kept for that, which takes a third stage.
  static constexpr bool kOptimistic = JAX_FLASH_SM90_OPTIMISTIC && kStages >= 3;
  static_assert(!kScoresAhead || (kOptimistic && kStages >= 4 && kQueryStages > 1));
  static constexpr int kKeyOffset = kQueryStages * kRowGroups * QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * KeyTile::kBytes;
  // Descriptions of query tiles that are kept: of those with scores under way, output to be
  // finished and Q under way, and one more.
  static constexpr int kWorks = 4;
  static constexpr int kPartialOffset = kValueOffset + kValueStages * ValueTile::kBytes;
  static constexpr int kOwnOffset = kPartialOffset + kPartialBytes;
  static constexpr int kSmemBytes = kOwnOffset + kConsumers * 4 * kOwnBytes;
};

}  // namespace jax_flash::sm90
