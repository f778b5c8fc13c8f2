// Defines tile sizes, warp roles and shared-memory plans of the sm_90 forward kernel.
#pragma once

#include <cstdint>

#include "plan/recipes.h"
#include "tile/smem_tile.cuh"

// Switches of `python benchmarks/run.py ablation`; the shipped settings are their values. More of
// them are in plan/recipes.h.
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
// From this product of keys and head dim on, each unit is a block of its own.
#ifndef JAX_FLASH_SM90_LONG_UNIT
#define JAX_FLASH_SM90_LONG_UNIT (32768 * 256)
#endif
// If set, the units that remain after an even division each get a block of their own.
#ifndef JAX_FLASH_SM90_REST_APART
#define JAX_FLASH_SM90_REST_APART 1
#endif

namespace jax_flash::sm90 {

inline constexpr int kSmemLimit = 227 * 1024;
inline constexpr int kStaticSmemBytes = 2048;  // for barriers and work, at most
// Bounds a thread's sum of probabilities in a row of a tile, relative to the row's running maximum:
// safe in float16.
inline constexpr float kOptimisticLimit = 1024.0f;
// The next three are for P in float16 with Q and K in bfloat16 (plan/half_values.h): the same
// bound; log2 of P for a logit equal to the running maximum; and by how much, in log2 units, a
// logit that is compared with the running maximum may exceed it.
inline constexpr float kHalfSumLimit = 0x1p15f;
inline constexpr int kHalfLift = 9;
inline constexpr float kHalfSlack = 5.0f;
inline constexpr int kWarpgroup = 128;  // threads

// Configures a kernel. A block has one producer warpgroup, whose warps start the copies, and
// kConsumerGroups consumer warpgroups, which compute 64 rows of the output each. It iterates over
// tiles of kBlockKvRows keys and values.
//
// With two kKeyShares, both consumers have the same 64 rows, and divide the tiles. There are
// kFewerValues fewer stages of V than of K.
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
  static constexpr bool kLeftCut = kAhead == ScoresAhead::kLeftCut;
  static constexpr bool kSecondCut = kAhead == ScoresAhead::kTwoCut || kLeftCut;
  // kMarksLast: for short calls, a query tile's description marks a block's last one, so that
  // consumers need not wait for another. kProducersFirst: the producers' code is placed first.
  static constexpr bool kMarksLast = kScoresAhead && !kSecondCut, kProducersFirst = kMarksLast;
  // The number of parts in which P V is started, interleaved with exponentials.
  static constexpr int kOutParts =
      kHeadDim <= 64 ? JAX_FLASH_SM90_OUT_PARTS_64 : JAX_FLASH_SM90_OUT_PARTS;
  static_assert(kHeadDim % 16 == 0 && kValueDim % 16 == 0 && kBlockKv % 16 == 0);
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  // Registers per thread after setmaxnreg; the kernel starts with an even share.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 232;

  // Each consumer's rows of Q are a tile with its own barriers, so that no consumer waits for
  // another.
  using QueryTile = SmemTile<64, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = SmemTile<kBlockKv, kValueDim>;

  // Shared memory holds kQueryStages times kRowGroups query tiles, kStages key tiles and
  // kValueStages value tiles; with divided keys, one consumer's output in float32 and its
  // statistics for the other one. If there is room, Q has a second stage; otherwise the next Q is
  // fetched when the last scores of this one are done.
  static constexpr int kQueryStages = kHeadDim <= 64 ? JAX_FLASH_SM90_QUERY_STAGES : 1;
  static constexpr int kPartialBytes = kKeyGroups > 1 ? 64 * kValueDim * 4 + kWarpgroup * 16 : 0;
  // True if the mask is read as words, not as bytes (plan/mask_words.h).
  static constexpr bool kMaskWords = kHasMaskWords;
  static constexpr bool kKeyMask = false;  // see KeyMaskConfig
  static constexpr bool kBiasInScores = kBias == BiasPlace::kInScores;
  // True if a producer copies the bias for all of a consumer's warps together.
  static constexpr bool kBiasBoxes = kBias == BiasPlace::kBoxes || kBiasInScores;
  // Bytes for a warp's 16 rows of a tile.
  static constexpr int kOwnBytes = kBias == BiasPlace::kFloats  ? 16 * kBlockKv * 4
                                   : kBias == BiasPlace::kBoxes ? 16 * kBlockKv * 2
                                   : kBiasInScores              ? (kBlockKv + 63) / 64 * 64 * 16 * 2
                                                                : 0;
  static constexpr int kFree = kSmemLimit - kStaticSmemBytes -
                               kQueryStages * kRowGroups * QueryTile::kBytes - kPartialBytes -
                               kConsumers * 4 * kOwnBytes;
  static constexpr int kFit =
      (kFree + kFewerValues * ValueTile::kBytes) / (KeyTile::kBytes + ValueTile::kBytes);
  // If two warpgroups each hold a tile's keys together with those of the next one, they need more
  // stages.
  static constexpr int kMostStages = 4 + (kScoresAhead ? kKeyGroups - 1 : 0);
  static constexpr int kStages = kFit < kMostStages ? kFit : kMostStages;
  static constexpr int kValueStages = kStages > 2 ? kStages - kFewerValues : kStages;
  static_assert(kValueStages >= 2 && (kKeyGroups == 1 || kStages >= 4));
  // True if, after a query tile's first key tile, exponentials are computed without a search for
  // greater scores. A sum beyond kOptimisticLimit reveals a greater score, and the tile is redone.
  // Its keys must be kept for that, which takes a third stage.
  static constexpr bool kOptimistic = JAX_FLASH_SM90_OPTIMISTIC && kStages >= 3;
  static_assert(!kScoresAhead || (kOptimistic && kStages >= 4));
  static constexpr int kKeyOffset = kQueryStages * kRowGroups * QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * KeyTile::kBytes;
  // Number of query tile descriptions that are kept: for the tiles whose scores are in flight,
  // whose output is to be finished and whose Q is in flight, and one more.
  static constexpr int kWorks = 4;
  static constexpr int kPartialOffset = kValueOffset + kValueStages * ValueTile::kBytes;
  static constexpr int kOwnOffset = kPartialOffset + kPartialBytes;
  static constexpr int kSmemBytes = kOwnOffset + kConsumers * 4 * kOwnBytes;
};

// Adds a mask that all queries of a head share to a kernel without modifiers
// (sm90/forward/key_mask.cuh).
template <typename Base>
struct KeyMaskConfig : Base {
  static constexpr bool kKeyMask = true;
};

}  // namespace jax_flash::sm90
