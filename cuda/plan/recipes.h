// Lists the kernels of the sm_90 forward pass. A row names a kernel, the head dims and modifiers
// that it supports, and the sizes of its tiles.
//
// choose.cc picks a row for each call, explain() reports its name, and sm90/forward/launch.cuh
// instantiates the kernel from the row. A new kernel needs one row here and one condition in
// choose.cc.
#pragma once

#include <cstdint>

#include "plan/float32_tiles.h"
#include "plan/modifiers.h"

// `python benchmarks/run.py ablation` overrides these switches; the values below are shipped.
#ifndef JAX_FLASH_SM90_OPTIMISTIC
#define JAX_FLASH_SM90_OPTIMISTIC 1
#endif
#ifndef JAX_FLASH_SM90_QUERY_STAGES
#define JAX_FLASH_SM90_QUERY_STAGES 2
#endif
#ifndef JAX_FLASH_SM90_SPLIT_KEYS
#define JAX_FLASH_SM90_SPLIT_KEYS 1
#endif
#ifndef JAX_FLASH_SM90_SCORES_AHEAD
#define JAX_FLASH_SM90_SCORES_AHEAD 1
#endif

namespace jax_flash::sm90 {

// Says whether a consumer computes the scores of the next key tile while it computes the
// exponentials of the current one. If it does, an edge of the band (causal order or window) may cut
// only its last key tile, or its last two. With kLeftCut, a window's left edge may cut its first
// one, and the right edge only its last one.
enum class ScoresAhead { kNo, kOneCut, kTwoCut, kLeftCut };
inline constexpr bool kHasScoresAhead =
    JAX_FLASH_SM90_SCORES_AHEAD && JAX_FLASH_SM90_OPTIMISTIC && JAX_FLASH_SM90_QUERY_STAGES > 1;

// Says how consumer warps keep their part of a bias in shared memory (sm90/forward/bias.cuh):
//   kFloats    4-byte elements
//   kBoxes     2-byte elements, in boxes of as many columns as a tile has keys
//   kInScores  2-byte elements, in boxes of multiples of 64 columns; the accumulators of the scores
//              start from the bias instead of zero (sm90/forward/step.cuh)
enum class BiasPlace { kNone, kFloats, kBoxes, kInScores };

enum class Recipe : int32_t {
  kDecode,
  kChained,         // query tiles in one chain: the first scores of one overlap the last P V
  kChainedPair,     // the same with two consumers
  kNarrowValues,    // the same for values of fewer columns than keys have
  kAheadOneCut,     // scores a tile ahead, at most one tile cut by an edge
  kAheadTwoCut,     // the same with two tiles cut
  kAheadLeftCut,    // the same, one of them by a window's left edge
  kSplitKeys,       // two consumers divide the keys of the same 64 queries
  kSplitKeysAhead,  // the same with scores a tile ahead
  kShort,           // all keys of a head in shared memory
  kShortKeyMask,    // the same with a mask that all queries of a head share
  kShortEvery,      // the same with any modifiers
  kSegments,
  kSegmentsSoftCap,
  kSegmentsBias,
  kSegmentsSlopes,
  kBiasFloats,
  kBiasBoxes,
  kBiasInScores,
  kSoftCap,
  kSoftCapLong,
  kMaskBytes,
  kMaskWords,
  kMaskWordsTriple,  // the same with three consumers
  kKeyMask,          // query tiles in one chain, with a mask that all queries of a head share
  kKeyMaskTriple,    // the same with three consumers
  kMaskSoftCap,
  kMaskDropout,
  kSlopes,  // ALiBi slopes of a causal call
  kDropout,
  kEvery,    // any modifiers together
  kColumns,  // head dims above 256: two consumers divide the columns of 64 queries' output
  kFloat8,
  kFloat8Modified,
  kFloat32,
  kFloat32Elements,
  kFloat32Modified,
  kFloat16Elements,  // float32 operands that are split into two numbers of float16 each
  kFloat16Modified,
};

// The operands of a kernel.
enum class Operands { k16Bits, kFloat8, kFloat32 };

// Returns the number of keys in a tile of the kernels that read a mask as words.
constexpr int mask_words_keys(int head_dim) { return head_dim <= 128 ? 128 : 80; }

// Describes a kernel. A block has `consumers` consumer warpgroups. With one `key_groups`, each of
// them takes its own 64 queries; with two, both consumers share the same 64. V has `fewer_values`
// fewer stages than K.
struct RecipeRow {
  Recipe recipe;
  const char* name;
  int32_t head_dim, value_dim;  // the largest that the kernel takes
  uint32_t modifiers;           // the modifiers that the kernel supports
  int32_t consumers, keys;      // keys: the number of keys in a tile
  int32_t key_groups = 1;
  ScoresAhead ahead = ScoresAhead::kNo;
  BiasPlace bias = BiasPlace::kNone;
  int32_t fewer_values = 0;
  bool bfloat16_only = false;
  Operands operands = Operands::k16Bits;

  constexpr bool mask_words() const {
    return recipe == Recipe::kMaskWords || recipe == Recipe::kMaskWordsTriple ||
           recipe == Recipe::kMaskSoftCap || recipe == Recipe::kMaskDropout;
  }
  // True for a kernel of two modifiers.
  constexpr bool is_pair() const {
    return operands == Operands::k16Bits && modifiers != kEveryModifier &&
           (modifiers & (modifiers - 1)) != 0;
  }
  constexpr int32_t queries() const { return 64 * consumers / key_groups; }
  constexpr bool exists() const { return ahead == ScoresAhead::kNo || kHasScoresAhead; }
};

constexpr RecipeRow float8_row(int32_t head_dim, bool modified) {
  RecipeRow row{modified ? Recipe::kFloat8Modified : Recipe::kFloat8,
                modified ? "FP8, segments and soft cap" : "FP8",
                head_dim,
                head_dim,
                modified ? uint32_t{kSegments | kSoftCap} : uint32_t{kNoModifier},
                2,
                128};
  row.operands = Operands::kFloat8;
  return row;
}

constexpr RecipeRow float32_row(Recipe recipe, const char* name, int32_t head_dim,
                                uint32_t modifiers, bool split = false) {
  RecipeRow row{
      recipe, name, head_dim, head_dim, modifiers, 2, Float32Tiles::keys(head_dim, split)};
  row.operands = Operands::kFloat32;
  return row;
}

constexpr RecipeRow pair_row(Recipe recipe, const char* name, int32_t head_dim, uint32_t modifiers,
                             int32_t keys) {
  RecipeRow row{recipe, name, head_dim, head_dim, modifiers, 2, keys};
  row.bfloat16_only = true;
  return row;
}

inline constexpr RecipeRow kRecipes[] = {
    // Few query rows (sm90/decode).
    {Recipe::kDecode, "decode", 64, 64, kNoModifier, 1, 128},
    {Recipe::kDecode, "decode", 96, 96, kNoModifier, 1, 64},
    {Recipe::kDecode, "decode", 128, 128, kNoModifier, 1, 64},
    {Recipe::kDecode, "decode", 192, 192, kNoModifier, 1, 32},
    {Recipe::kDecode, "decode", 256, 256, kNoModifier, 1, 64},
    // No modifiers.
    {Recipe::kSplitKeysAhead, "split keys, scores ahead", 64, 64, kNoModifier, 2, 128, 2,
     ScoresAhead::kOneCut},
    {Recipe::kAheadTwoCut, "scores ahead, two edges", 64, 64, kNoModifier, 2, 128, 1,
     ScoresAhead::kTwoCut},
    {Recipe::kAheadLeftCut, "scores ahead, window", 64, 64, kNoModifier, 2, 128, 1,
     ScoresAhead::kLeftCut},
    {Recipe::kAheadOneCut, "scores ahead", 64, 64, kNoModifier, 2, 128, 1, ScoresAhead::kOneCut},
    {Recipe::kSplitKeys, "split keys", 64, 64, kNoModifier, 2, 128, 2},
    // The sizes are those of a warpgroup; a block has four (sm90/forward/short.cuh).
    {Recipe::kShort, "short", 64, 64, kNoModifier, 1, 64},
    {Recipe::kChainedPair, "chained, two consumers", 64, 64, kNoModifier, 2, 128},
    {Recipe::kChained, "chained", 64, 64, kNoModifier, 3, 128},
    {Recipe::kChained, "chained", 96, 96, kNoModifier, 3, 112},
    {Recipe::kChainedPair, "chained, two consumers", 96, 96, kNoModifier, 2, 128},
    {Recipe::kSplitKeysAhead, "split keys, scores ahead", 96, 96, kNoModifier, 2, 64, 2,
     ScoresAhead::kOneCut},
    {Recipe::kSplitKeysAhead, "split keys, scores ahead", 128, 128, kNoModifier, 2, 64, 2,
     ScoresAhead::kOneCut},
    {Recipe::kChained, "chained", 128, 128, kNoModifier, 2, 128},
    {Recipe::kNarrowValues, "chained, narrow values", 192, 128, kNoModifier, 2, 96, 1,
     ScoresAhead::kNo, BiasPlace::kNone, 1},
    {Recipe::kChained, "chained", 192, 192, kNoModifier, 2, 112},
    {Recipe::kChained, "chained", 256, 256, kNoModifier, 2, 80},
    // One modifier, which needs registers: with three consumers, only head dim 64 leaves enough,
    // mostly with fewer keys per tile.
    {Recipe::kSegments, "segments", 64, 64, kSegments, 2, 128},
    {Recipe::kSegments, "segments", 128, 128, kSegments, 2, 128},
    {Recipe::kSegments, "segments", 256, 256, kSegments, 2, 64},
    {Recipe::kBiasInScores, "bias in scores", 64, 64, kBias, 3, 112, 1, ScoresAhead::kNo,
     BiasPlace::kInScores, 0, true},
    {Recipe::kBiasFloats, "float32 bias", 64, 64, kBias, 3, 96, 1, ScoresAhead::kNo,
     BiasPlace::kFloats},
    {Recipe::kBiasBoxes, "bias", 64, 64, kBias, 3, 96, 1, ScoresAhead::kNo, BiasPlace::kBoxes},
    {Recipe::kBiasFloats, "float32 bias", 128, 128, kBias, 2, 96, 1, ScoresAhead::kNo,
     BiasPlace::kFloats},
    {Recipe::kBiasBoxes, "bias", 128, 128, kBias, 2, 128, 1, ScoresAhead::kNo, BiasPlace::kBoxes,
     1},
    {Recipe::kBiasFloats, "float32 bias", 256, 256, kBias, 2, 64, 1, ScoresAhead::kNo,
     BiasPlace::kFloats},
    {Recipe::kBiasBoxes, "bias", 256, 256, kBias, 2, 64, 1, ScoresAhead::kNo, BiasPlace::kBoxes},
    {Recipe::kSoftCapLong, "soft cap, long", 64, 64, kSoftCap, 3, 128, 1, ScoresAhead::kNo,
     BiasPlace::kNone, 0, true},
    {Recipe::kSoftCap, "soft cap", 64, 64, kSoftCap, 3, 96},
    {Recipe::kSoftCap, "soft cap", 128, 128, kSoftCap, 2, 128},
    {Recipe::kSoftCap, "soft cap", 256, 256, kSoftCap, 2, 80},
    {Recipe::kShortKeyMask, "short, mask of keys", 64, 64, kMask, 1, 64},
    {Recipe::kMaskBytes, "mask", 64, 64, kMask, 2, 128},
    {Recipe::kMaskBytes, "mask", 128, 128, kMask, 2, 128},
    {Recipe::kMaskWords, "mask as words", 64, 64, kMask, 2, mask_words_keys(64)},
    {Recipe::kMaskWordsTriple, "mask as words, three consumers", 64, 64, kMask, 3,
     mask_words_keys(64)},
    {Recipe::kMaskWords, "mask as words", 128, 128, kMask, 2, mask_words_keys(128)},
    {Recipe::kMaskWords, "mask as words", 256, 256, kMask, 2, mask_words_keys(256)},
    {Recipe::kKeyMask, "chained, mask of keys", 64, 64, kMask, 2, mask_words_keys(64)},
    {Recipe::kKeyMaskTriple, "chained, mask of keys, three consumers", 64, 64, kMask, 3,
     mask_words_keys(64)},
    {Recipe::kKeyMask, "chained, mask of keys", 96, 96, kMask, 2, mask_words_keys(96)},
    {Recipe::kKeyMask, "chained, mask of keys", 128, 128, kMask, 2, mask_words_keys(128)},
    {Recipe::kKeyMask, "chained, mask of keys", 256, 256, kMask, 2, mask_words_keys(256)},
    {Recipe::kSlopes, "ALiBi", 64, 64, kDistance, 2, 128, 1, ScoresAhead::kNo, BiasPlace::kNone, 0,
     true},
    {Recipe::kSlopes, "ALiBi", 128, 128, kDistance, 2, 128, 1, ScoresAhead::kNo, BiasPlace::kNone,
     0, true},
    {Recipe::kDropout, "dropout", 64, 64, kDropout, 3, 96},
    {Recipe::kDropout, "dropout", 128, 128, kDropout, 2, 128},
    // Two modifiers, where models use both (sm90/forward/pairs.cuh).
    pair_row(Recipe::kSegmentsSoftCap, "segments and soft cap", 64, kSegments | kSoftCap, 128),
    pair_row(Recipe::kSegmentsSoftCap, "segments and soft cap", 128, kSegments | kSoftCap, 128),
    pair_row(Recipe::kSegmentsSoftCap, "segments and soft cap", 256, kSegments | kSoftCap, 64),
    pair_row(Recipe::kSegmentsBias, "segments and bias", 64, kSegments | kBias, 128),
    pair_row(Recipe::kSegmentsBias, "segments and bias", 128, kSegments | kBias, 128),
    pair_row(Recipe::kSegmentsSlopes, "segments and ALiBi", 64, kSegments | kDistance, 128),
    pair_row(Recipe::kSegmentsSlopes, "segments and ALiBi", 128, kSegments | kDistance, 128),
    pair_row(Recipe::kMaskSoftCap, "mask and soft cap", 64, kMask | kSoftCap, mask_words_keys(64)),
    pair_row(Recipe::kMaskSoftCap, "mask and soft cap", 128, kMask | kSoftCap,
             mask_words_keys(128)),
    pair_row(Recipe::kMaskSoftCap, "mask and soft cap", 256, kMask | kSoftCap,
             mask_words_keys(256)),
    pair_row(Recipe::kMaskDropout, "mask and dropout", 64, kMask | kDropout, mask_words_keys(64)),
    pair_row(Recipe::kMaskDropout, "mask and dropout", 128, kMask | kDropout, mask_words_keys(128)),
    // Any modifiers, in calls of short sequences. The sizes are those of a warpgroup; a block has
    // three.
    {Recipe::kShortEvery, "short, every modifier", 64, 64, kEveryModifier, 1, 64},
    // Several modifiers, or one modifier at a head dim without a kernel for it. The loop contains
    // ten times as many instructions as a call executes.
    {Recipe::kEvery, "every modifier", 64, 64, kEveryModifier, 2, 128},
    {Recipe::kEvery, "every modifier", 96, 96, kEveryModifier, 2, 128},
    {Recipe::kEvery, "every modifier", 128, 128, kEveryModifier, 2, 128},
    {Recipe::kEvery, "every modifier", 192, 192, kEveryModifier, 2, 96},
    {Recipe::kEvery, "every modifier", 256, 256, kEveryModifier, 2, 64},
    {Recipe::kColumns, "columns", 512, 512, kNoModifier, 2, 64, 2},
    // Operands of float8 (sm90/forward_float8).
    float8_row(64, false),
    float8_row(96, false),
    float8_row(128, false),
    float8_row(192, false),
    float8_row(256, false),
    float8_row(64, true),
    float8_row(96, true),
    float8_row(128, true),
    float8_row(192, true),
    float8_row(256, true),
    // Operands of float32 at default precision (sm90/forward_float32).
    float32_row(Recipe::kFloat32, "TF32", 64, kNoModifier),
    float32_row(Recipe::kFloat32, "TF32", 128, kNoModifier),
    float32_row(Recipe::kFloat32Elements, "TF32, bias and mask", 64, kFloat32Elements),
    float32_row(Recipe::kFloat32Elements, "TF32, bias and mask", 128, kFloat32Elements),
    float32_row(Recipe::kFloat32Elements, "TF32, bias and mask", 256, kFloat32Elements),
    float32_row(Recipe::kFloat32Modified, "TF32, every modifier but segments", 64,
                kFloat32Modifiers),
    float32_row(Recipe::kFloat32Modified, "TF32, every modifier but segments", 128,
                kFloat32Modifiers),
    float32_row(Recipe::kFloat32Modified, "TF32, every modifier but segments", 256,
                kFloat32Modifiers),
    // The same for split operands, whose products are as exact as those of float32.
    float32_row(Recipe::kFloat16Elements, "split float16, bias and mask", 64, kFloat32Elements,
                true),
    float32_row(Recipe::kFloat16Elements, "split float16, bias and mask", 128, kFloat32Elements,
                true),
    float32_row(Recipe::kFloat16Modified, "split float16, every modifier but segments", 64,
                kFloat32Modifiers, true),
    float32_row(Recipe::kFloat16Modified, "split float16, every modifier but segments", 128,
                kFloat32Modifiers, true),
};
inline constexpr int kRecipeCount = sizeof(kRecipes) / sizeof(kRecipes[0]);

// Returns the index of the row with this recipe and head dim, or -1.
constexpr int recipe_row(Recipe recipe, int32_t head_dim) {
  for (int row = 0; row < kRecipeCount; ++row) {
    if (kRecipes[row].recipe == recipe && kRecipes[row].head_dim == head_dim) return row;
  }
  return -1;
}

}  // namespace jax_flash::sm90
