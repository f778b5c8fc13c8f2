// Defines the interface of a modifier of the sm_90 forward kernel: constants, and hooks that
// consumers call in each step.
//
// A modifier is a struct ForwardModifier<Config, Element, kModifiers> that derives from
// ModifierDefaults and replaces what it needs: bias.cuh, mask.cuh, segments.cuh, soft_cap.cuh,
// dropout.cuh and slopes.cuh have one each, and pairs.cuh combines two; those for no modifier and
// for all of them together are here. A new modifier takes a file of its own, which kernel.cuh
// includes, and a row of plan/recipes.h. Such a file may also specialize RowStatistics
// (parts.cuh). Orders, steps and producers do not name modifiers. The epilogue
// (parts.cuh) names three: a bias and slopes, for rows of low logits, and dropout, for its scale.
//
// A modifier that can be computed with the exponentials sets kJudges, and implements judge(),
// modify() for tiles that an edge cuts or whose logits are compared with running maxima first, and
// exponentials() for all others.
//
// Hazard: members are in a consumer's registers, and the order of their declarations changes the
// machine code.
#pragma once

#include <cstdint>

#include "modifiers/logits.cuh"
#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "sm90/forward/config.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "tile/band.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Lists what is known of a tile at compile time. kInRun: the tile and the one before it, even if
// that one belongs to another query tile, have one segment each. kInner: no edge cuts the tile, its
// addends were read ahead, and its logits are not compared with the running maxima before its
// exponentials. These are interleaved with the modifier.
enum class TileKind { kAny, kInRun, kInner };

// Lists the conditions under which a kernel uses a method.
enum class When { kNever, kWithHalfValues, kUnlessOptimistic, kAlways };

template <typename Config, typename Element, uint32_t kModifiers>
struct ModifierDefaults {
  static constexpr int kN = Config::kBlockKv / 8;
  using Scores = float[1][kN][4];

  // If Config::kOptimistic: when exponentials are computed before their logits are compared with
  // the running maxima.
  static constexpr When kOptimistic = When::kAlways;
  // When a running maximum rises to any greater logit that is compared with it, not only to one far
  // above it (OnlineSoftmax).
  static constexpr When kExactMaxima = When::kNever;
  // True if logits and exact running maxima are compared as bits (sm90/forward/exact_maximum.cuh).
  static constexpr bool kComparesBits = true;
  // True if the running maximum is subtracted from a logit before the factor to_log2
  // (OnlineSoftmax).
  static constexpr bool kByDifference = false;
  // The number of parts in which P V is started (Config::kOutParts).
  static constexpr int kOutParts = 1;
  // True if the rest of a query tile's description is read while its first scores are computed.
  static constexpr bool kDescribedLate = false;
  // True if, with float16 values, a step waits for the next tile's keys: see ForwardConsumer.
  static constexpr bool kWaitsAhead = false;
  // True if, with Q released early, a redo of a query tile's last key tile reads Q from global
  // memory. Otherwise the logits of that tile are compared first, which takes separate code.
  static constexpr bool kReadsQueryAgain = false;
  // kMasks: true if elements of any tile may be forbidden. kBits: true if the allowed elements are
  // known, as bits, before the scores.
  static constexpr bool kMasks = false, kBits = false;
  // True if modify() turns products into logits before bits decide which of them are allowed.
  static constexpr bool kChangesLogits = false;
  // True if forbidden elements may make sums NaN.
  static constexpr bool kAddsInfinity = false;
  // kSkips: true if key tiles are skipped; the producer then signals a query tile when all is known
  // about it. kHasRuns: true if runs of contiguous tiles are then known to forbid nothing
  // (SegmentNotes).
  static constexpr bool kSkips = false, kHasRuns = false;
  // kAddends: true if addends of logits are read a tile ahead. kInScores: true if scores begin with
  // them, as the accumulators' first values.
  static constexpr bool kAddends = false, kInScores = false;
  // True if judge() decides how exponentials are computed.
  static constexpr bool kJudges = false;
  // kApproximates: true if logits are approximated. kSaturates: true if running maxima are 0 where
  // they can be, so that exponentials are computed from products directly. kFixedTiles: true if the
  // usual tiles then have a loop of their own.
  static constexpr bool kApproximates = false, kSaturates = false, kFixedTiles = false;

  // True if a warp has one running maximum, the greatest logit of the first tile without the
  // modifier, which addend() then applies. The logits stay in products' units.
  static constexpr bool kFixedMaxima = false;

  // True if all elements of the tile are allowed, for modifiers with kBits. They replace this
  // member by another one; a function would change the machine code.
  static constexpr bool all_allowed = true;

  ModifierDefaults() = default;
  __device__ __forceinline__ ModifierDefaults(const Forward&, const ForwardPlan&,
                                              const ForwardSmem<Config>&, int) {}

  // Begins a query tile: the warp's rows are those from row0 on.
  __device__ __forceinline__ void begin(const QueryWork&, int32_t) {}
  // Takes over the rest of a query tile's description, if kDescribedLate.
  __device__ __forceinline__ void describe(const ForwardPlan&, const QueryWork&, int32_t) {}
  // Reads a tile's operands ahead; a tile below 0 does not exist.
  __device__ __forceinline__ void read_ahead(const QueryWork&, int32_t) {}
  // Advances to the next tile, and reads ahead the operands of the tile after it, the argument.
  __device__ __forceinline__ void look_ahead(const QueryWork&, int32_t) {}
  // Prepares a tile before its scores are computed.
  __device__ __forceinline__ void prepare(const QueryWork&, int32_t, int32_t, bool) {}
  // Returns the bound below which a logit is taken for -inf. Relative to a running maximum of
  // -1e30, say, exponentials in log2 units would be off by any factor. launch.cc redoes the rows
  // that this affects.
  __device__ __forceinline__ float least_logit() const { return minus_infinity(); }
  // Turns a warp's products into logits, except for to_log2 and the band. If allowed elements are
  // known as bits, in all tiles or in those of several segments, forbid_all() does this instead,
  // and includes the band. The last argument, `again`: true if operands read ahead are no longer
  // held.
  __device__ __forceinline__ void modify(Scores& scores, const Forward& params,
                                         const ModifierOffsets& offsets, const Band& band,
                                         int32_t row0, int32_t col0, bool one_segment, bool) const {
    modify_scores<kModifiers>(scores, params, offsets, band, row0, col0, one_segment);
  }
  // Returns the addends of a tile's logits in log2 units (RowShifts), given the rows' running
  // maxima.
  __device__ __forceinline__ RowShifts addend(int32_t, const float (&shift)[2]) const {
    return {shift[0], shift[1]};
  }
  // Decides how a tile's exponentials are computed. Arguments: scores, edge, careful, whole,
  // assumes_small, longer. `careful`: logits are compared with the running maxima. The last three
  // are results. `whole`: exponentials follow all logits; otherwise the two are interleaved.
  // `assumes_small`: the tile is redone if its products are not small. `longer`: selects the longer
  // approximation.
  template <bool kAssumes>
  __device__ __forceinline__ void judge(const Scores&, bool, bool, bool&, bool&, bool&) const {}
  // Computes exponentials of a tile that no edge cuts and applies the modifier, in one basic block,
  // in which the assembler interleaves the two. The bool selects the longer approximation. Returns
  // whether products are too great for the approximation. The last argument, a function that
  // receives whether all elements are allowed, is called in the same basic block.
  template <int kLift = 0, typename Overlapped>
  __device__ __forceinline__ bool exponentials(Scores&, OnlineSoftmax<1>&, float, bool,
                                               Overlapped) {
    return false;
  }
  // Processes a query tile's key tiles after the first one, `tile`. Sets `tile` to the last one.
  template <typename Consumer>
  static __device__ __forceinline__ void attend_rest(Consumer& consumer, int32_t& tile) {
    for (; !consumer.is_last(tile); ++tile) consumer.next_tile(tile, tile + 1);
  }
  // Zeroes probabilities that are dropped. If kDropsRounded, drop_rounded() does this instead,
  // after they have been rounded.
  template <typename Consumer>
  static __device__ __forceinline__ void drop_some(Consumer&, int32_t) {}
  static constexpr bool kDropsRounded = false;
};

// Implements a kernel's modifiers: constants and hooks of ModifierDefaults.
template <typename Config, typename Element, uint32_t kModifiers>
struct ForwardModifier;

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kNoModifier>
    : ModifierDefaults<Config, Element, kNoModifier> {
  using Base = ModifierDefaults<Config, Element, kNoModifier>;
  static constexpr When kExactMaxima = When::kAlways;
  static constexpr bool kByDifference =
      Config::kHeadDim > 128 && !Config::kOptimistic;  // where it costs little
  static constexpr int kOutParts = Config::kOutParts;
  static constexpr bool kDescribedLate = true;

  __device__ __forceinline__ ForwardModifier(const Forward&, const ForwardPlan&,
                                             const ForwardSmem<Config>&, int) {}
  __device__ __forceinline__ void modify(typename Base::Scores&, const Forward&,
                                         const ModifierOffsets&, const Band&, int32_t, int32_t,
                                         bool, bool) const {}
};

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kEveryModifier>
    : ModifierDefaults<Config, Element, kEveryModifier> {
  static constexpr When kOptimistic = When::kNever, kExactMaxima = When::kAlways;
  static constexpr bool kComparesBits = false, kMasks = true, kSkips = true;

  const Forward& params;

  __device__ __forceinline__ ForwardModifier(const Forward& forward, const ForwardPlan&,
                                             const ForwardSmem<Config>&, int)
      : params(forward) {}
  __device__ __forceinline__ float least_logit() const {
    return adds_to_logits(params) ? kLeastLogit : minus_infinity();
  }
  template <typename Consumer>
  static __device__ __forceinline__ void drop_some(Consumer& consumer, int32_t tile) {
    if (consumer.params.options.dropout_threshold == 0) return;
    constexpr int kN = Config::kBlockKv / 8;
    drop(consumer.scores, consumer.modifiers().template kept<kN>(
                              consumer.work.row0 + consumer.warp_row, tile * Config::kBlockKv));
  }
};

}  // namespace jax_flash::sm90
