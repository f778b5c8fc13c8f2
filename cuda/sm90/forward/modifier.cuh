// Defines what the sm_90 forward kernel asks of a modifier: constants, and hooks that its consumers
// call in each step.
//
// A modifier is a struct ForwardModifier<Config, Element, kModifiers> that derives from
// ModifierDefaults and replaces what it needs: bias.cuh, mask.cuh, segments.cuh and soft_cap.cuh
// have one each; those for no modifier and for all of them together are here. A new one is a file
// of its own, which kernel.cuh includes, and a row of plan/recipes.h. Beside the struct, such a
// file may replace OffsetsOf (plan.cuh) and RowStatistics (parts.cuh). Orders, steps and producers
// do not name modifiers; rows of low logits with a bias and the scale of dropout (parts.cuh) do.
//
// A modifier that can be computed with the exponentials sets kJudges, and implements judge(),
// modify() for tiles that an edge cuts or whose logits are compared with running maxima first, and
// exponentials() for all others.
//
// Hazard: members are in a consumer's registers, and the order in which they are declared decides
// about the machine code.
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

// Says what is known of a tile at compile time. kInRun: it and the one before, even if that one
// belongs to another query tile, have one segment each. kInner: no edge cuts it,
// its addends were read ahead, and its logits are not compared with the running maxima before its
// exponentials, which are computed together with the modifier.
enum class TileKind { kAny, kInRun, kInner };

// Says when a kernel does something.
enum class When { kNever, kWithHalfValues, kUnlessOptimistic, kAlways };

template <typename Config, typename Element, uint32_t kModifiers>
struct ModifierDefaults {
  static constexpr int kN = Config::kBlockKv / 8;
  using Scores = float[1][kN][4];

  // When exponentials are computed before their logits are compared with the running maxima, if
  // Config::kOptimistic.
  static constexpr When kOptimistic = When::kAlways;
  // When a running maximum rises to any greater logit that is compared with it, not only to one far
  // above it (OnlineSoftmax).
  static constexpr When kExactMaxima = When::kNever;
  // True if logits and running maxima are then compared as bits (sm90/forward/exact_maximum.cuh).
  static constexpr bool kComparesBits = true;
  // True if exponentials are taken of differences to the running maximum.
  static constexpr bool kByDifference = false;
  // The number of parts in which P V is started (Config::kOutParts).
  static constexpr int kOutParts = 1;
  // True if the rest of a query tile's description is read while its first scores are computed.
  static constexpr bool kDescribedLate = false;
  // True if a tile waits for the next one's keys, given float16 values: see kWaitsAhead.
  static constexpr bool kWaitsAhead = false;
  // True if, with Q released early, a redo of a query tile's last tile of keys reads Q from global
  // memory. Otherwise the logits of that tile are compared first, which takes separate code.
  static constexpr bool kReadsQueryAgain = false;
  // True if elements may be forbidden in any tile, and if what is allowed is known, as bits, before
  // the scores are.
  static constexpr bool kMasks = false, kBits = false;
  // True if forbidden elements may make sums NaN.
  static constexpr bool kAddsInfinity = false;
  // True if key tiles are skipped: the producer signals a query tile when all is known about it.
  // Then, true if contiguous tiles are known to forbid nothing (SegmentNotes).
  static constexpr bool kSkips = false, kHasRuns = false;
  // True if addends of logits are read a tile ahead, and if scores begin with them.
  static constexpr bool kAddends = false, kInScores = false;
  // True if judge() decides how exponentials are computed.
  static constexpr bool kJudges = false;
  // True if logits are approximated; if running maxima are 0 where they let products be used as
  // they come; and if the usual tiles then have their own loop.
  static constexpr bool kApproximates = false, kSaturates = false, kFixedTiles = false;

  // True if a warp has one running maximum, the greatest logit of the first tile without the
  // modifier, which addend() then applies. The logits stay in products' units.
  static constexpr bool kFixedMaxima = false;

  // Says whether all of the tile's elements are allowed, where bits say so. A member, replaced by
  // another one: as a function it made other machine code.
  static constexpr bool all_allowed = true;

  // Begins a query tile: the warp's rows are those from row0 on.
  __device__ __forceinline__ void begin(const QueryWork&, int32_t) {}
  // Takes over the rest of a query tile's description, if kDescribedLate.
  __device__ __forceinline__ void describe(const ForwardPlan&, const QueryWork&, int32_t) {}
  // Reads ahead what a tile needs; a tile below 0 does not exist.
  __device__ __forceinline__ void read_ahead(const QueryWork&, int32_t) {}
  // Goes on to the next tile, and reads ahead what the tile after it, `behind`, needs.
  __device__ __forceinline__ void look_ahead(const QueryWork&, int32_t) {}
  // Prepares a tile before its scores are computed.
  __device__ __forceinline__ void prepare(const QueryWork&, int32_t, int32_t, bool) {}
  // Returns the logit below which a logit is taken for -inf: relative to a running maximum of
  // -1e30, say, exponentials in log2 units would be off by any factor. launch.cc has the rows that
  // this affects redone.
  __device__ __forceinline__ float least_logit() const { return minus_infinity(); }
  // Turns a warp's products into logits, except for to_log2 and the band. Where bits say what is
  // allowed, in all tiles or those of several segments, forbid_all() does so, with the band.
  // `again`: what was read ahead is gone.
  __device__ __forceinline__ void modify(Scores& scores, const Forward& params,
                                         const ModifierOffsets& offsets, const Band& band,
                                         int32_t row0, int32_t col0, bool one_segment, bool) const {
    modify_scores<kModifiers>(scores, params, offsets, band, row0, col0, one_segment);
  }
  // Returns what is added to the logits of a tile in log2 units (RowShifts), given the rows'
  // running maxima.
  __device__ __forceinline__ RowShifts addend(int32_t, const float (&shift)[2]) const {
    return {shift[0], shift[1]};
  }
  // Decides how a tile's exponentials are computed: `whole`: after all of its logits; otherwise
  // together with these. `assumes_small`: the tile is redone if its products are not small;
  // `longer`: uses the longer approximation. `careful`: logits are compared with the running
  // maxima.
  template <bool kAssumes>
  __device__ __forceinline__ void judge(const Scores&, bool, bool, bool&, bool&, bool&) const {}
  // Computes exponentials of a tile that no edge cuts, together with the modifier: in one basic
  // block, in which the assembler interleaves them. `longer`: uses the longer approximation.
  // Returns whether products are too great for it. `overlapped`, which receives whether all
  // elements are allowed, is interleaved, too.
  template <int kLift = 0, typename Overlapped>
  __device__ __forceinline__ bool exponentials(Scores&, OnlineSoftmax<1>&, float, bool,
                                               Overlapped) {
    return false;
  }
  // Processes a query tile's keys after its first tile, `tile`, which it sets to the last one.
  template <typename Consumer>
  static __device__ __forceinline__ void attend_rest(Consumer& consumer, int32_t& tile) {
    for (; !consumer.is_last(tile); ++tile) consumer.next_tile(tile, tile + 1);
  }
  // Zeroes probabilities that are dropped. Then, if kDropsRounded, drop_rounded() zeroes them after
  // they have been rounded.
  template <typename Consumer>
  static __device__ __forceinline__ void drop_some(Consumer&, int32_t) {}
  static constexpr bool kDropsRounded = false;
};

// Says how a kernel applies modifiers: constants and hooks of ModifierDefaults.
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
    drop<Config::kBlockKv / 8>(consumer.scores, consumer.modifiers(),
                               consumer.work.row0 + consumer.warp_row, tile * Config::kBlockKv);
  }
};

}  // namespace jax_flash::sm90
