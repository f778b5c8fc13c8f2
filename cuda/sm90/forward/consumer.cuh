// Defines ForwardConsumer: the state that a consumer warpgroup of the sm_90 forward kernel keeps in
// registers for its 64 rows, and the operations of a step. These wait for and release stages, start
// and await products, apply the modifier, raise running maxima, convert P and rescale O.
// sm90/forward/step.cuh puts them in order.
//
// Each warp has 16 of the rows, and each thread parts of two of these, its halves 0 and 1. Element
// scores[0][n][e] or out[0][n][e] is in row fragment_row(0, e), that is in half e / 2, and in
// column fragment_col(n, e). A row's statistics are in element [0][half].
#pragma once

#include <cstdint>

#include "modifiers/logits.cuh"
#include "modifiers/scores.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/exact_maximum.cuh"
#include "sm90/forward/key_mask.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/order_window.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/redo.cuh"
#include "sm90/forward/redo_scores.cuh"
#include "sm90/forward/segments.cuh"
#include "sm90/fragments.cuh"
#include "tile/softmax.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

// Value: the type of V in shared memory, and so of P.
template <typename Config, typename Element, uint32_t kModifiers, typename Value = Element>
struct ForwardConsumer {
  using Modifier = ForwardModifier<Config, Element, kModifiers>;
  static constexpr bool kPlainSteps = kChecksLate<Config, kModifiers> || Modifier::kFixedMaxima;
  static constexpr bool kHasRuns = Modifier::kHasRuns, kSkips = Modifier::kSkips;
  static constexpr bool kMasks = Modifier::kMasks;
  // True if query tiles are chained, and Q is released early.
  static constexpr bool kChained = !kMasks || (Modifier::kBits && Config::kMaskWords);
  static constexpr bool kHalfValues = !std::is_same_v<Value, Element>;
  // True if exponentials are computed before their logits are compared with the running maxima.
  // With a mask, or a bias alone, this holds only if P has enough bits to be accurate without the
  // rows' greatest logits.
  static constexpr bool kOptimistic =
      Config::kOptimistic && Config::kKeyGroups == 1 &&
      (Modifier::kOptimistic == When::kAlways ||
       (Modifier::kOptimistic == When::kWithHalfValues && kHalfValues));
  // The number of careful tiles after a tile that had to be redone, or a careful tile in which a
  // running maximum rose. The logits of a careful tile are compared with the running maxima before
  // its exponentials.
  static constexpr int kCarefulTiles = 16;
  // True if a running maximum rises to any greater logit that is compared with it, not only to one
  // far above it (OnlineSoftmax). With segments this would be up to 8% slower.
  static constexpr bool kExactMaxima =
      Modifier::kExactMaxima == When::kAlways || Config::kKeyGroups > 1 ||
      (Modifier::kExactMaxima == When::kUnlessOptimistic && !kOptimistic);
  // True if, without modifiers, running maxima follow the greatest logits whatever the first keys'
  // sums are. This holds if all of P has the operands' type.
  static constexpr bool kAlwaysExact = Config::kKeyGroups > 1 || std::is_same_v<Element, __half>;
  // True if the first running maxima are guessed (order_ahead.cuh).
  static constexpr bool kGuesses = false;
  static constexpr bool kByBits = kExactMaxima && Modifier::kComparesBits;
  static constexpr bool kByDifference = Modifier::kByDifference;
  static constexpr int kN = Config::kBlockKv / 8, kOutN = Config::kValueDim / 8;
  static constexpr bool kLowWord = Modifier::kSaturates || Modifier::kInScores;
  static constexpr int kHeadSteps = Config::kHeadDim / 16, kKeySteps = Config::kBlockKv / 16;
  using ScoreProduct = ptx::Wgmma<Element, Config::kBlockKv>;
  // True if P V of every second tile is in float16 (sm90/forward/values.cuh).
  static constexpr bool kConverts = kConvertsValues<Config, Element, kModifiers>;
  template <bool kHalf>
  using Weight = std::conditional_t<kHalf, __half, Value>;
  template <bool kHalf>
  using OutProduct = ptx::Wgmma<Weight<kHalf>, Config::kValueDim>;
  using Scores = float[1][kN][4];
  static constexpr bool kReadsQueryAgain =
      Modifier::kReadsQueryAgain && kChained && Config::kQueryStages == 1 && kOptimistic;
  // True if a step waits for the next tile's keys, and for its own V only while the next scores are
  // computed, as without modifiers.
  static constexpr bool kWaitsAhead =
      kPlainSteps || (kHalfValues && kChained && Modifier::kWaitsAhead);
  // True if a query tile's output is stored while the scores of the next query tile's second key
  // tile are computed. Kernels for values as wide as keys do not: the code of one more step costs
  // them more than it saves (TUNING.md, "Between query tiles"). With kAlwaysExact, another loop
  // follows.
  static constexpr bool kStoresLate = kChecksLate<Config, kModifiers> && !kAlwaysExact &&
                                      !kConverts && Config::kValueDim < Config::kHeadDim;
  // kLift: log2 of P for a logit equal to its row's running maximum. kSumLimit: a thread's sum of a
  // tile beyond which running maxima rise. Both depend on the range of float16: it is exact to 11
  // bits from 2^-14 on, and ends at 2^16.
  static constexpr int kLift = kHalfValues ? kHalfLift : 0;
  static constexpr float kSumLimit = kHalfValues ? kHalfSumLimit : kOptimisticLimit;

  const Forward& params;  // for what `plan` lacks
  const ForwardPlan& plan;
  const ForwardSmem<Config>& smem;
  int group;     // index among the consumers
  int warp_row;  // this warp's first row, among the block's rows
  float to_log2;

  RingState<Config::kStages> key_stage;
  RingState<Config::kValueStages> value_stage;
  RingState<Config::kQueryStages> query_stage;
  uint32_t works = 0;  // number of query tiles before the one in `work`
  QueryWork work;      // the query tile of the scores
  bool is_last_query;  // set if Config::kMarksLast
  float out[1][kOutN][4];
  int out_started = 0;
  OnlineSoftmax<1> softmax;
  bool by_bits;           // kByBits: true if no running maximum is below 0
  int careful_tiles = 0;  // number of careful tiles still to come
  Scores scores;
  uint32_t probabilities[kKeySteps][4];
  float factor[1][2];    // factor for `out` if a running maximum rises
  bool rises = false;    // kPlainSteps: true if `out` is to be multiplied
  bool is_half = false;  // kConverts: true if `probabilities` are float16
  Range fixed;           // tiles whose running maxima are 0 in next_capped_tile()
  // The next three are used if scores begin with the bias. The exponentials then take no longer
  // than without a bias, so every other instruction counts. `uncut`: tiles that the band does not
  // cut and whose bias is not read element by element. `shift`: the running maxima in log2 units,
  // less kLift, or 0. `unready`: 1 if a row has no running maximum yet, else 0.
  Range uncut;
  float shift[2];
  int unready;
  // A bit per column of this thread: with a mask of keys, set if the mask allows it; otherwise, set
  // if the thread's warp attends to it.
  uint32_t columns = 0;
  Modifier modifier;
  Range run;         // key tiles of one segment (SegmentNotes)
  KeyTileNote note;  // for the tile of the scores
  bool one_segment;  // for the tile of the probabilities

  __device__ __forceinline__ ForwardConsumer(const Forward& forward, const ForwardPlan& planned,
                                             const ForwardSmem<Config>& where)
      : params(forward),
        plan(planned),
        smem(where),
        // The reduction puts `group` into a uniform register, and so the descriptors that depend on
        // it.
        group(__reduce_max_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup - 1)),
        warp_row(group_row() + threadIdx.x % kWarpgroup / 32 * 16),
        to_log2(planned.to_log2),
        modifier(forward, planned, where, group) {}

  __device__ __forceinline__ int query_tile() const { return group % Config::kRowGroups; }
  __device__ __forceinline__ int group_row() const { return query_tile() * 64; }

  // Waits for the next query tile; returns false after the last one. With kDescribedLate, only its
  // key tiles and first row are known then: see read_description().
  __device__ __forceinline__ bool wait_query() {
    ptx::mbarrier_wait(smem.query_full(query_stage.stage, query_tile()), query_stage.parity);
    const QueryWork& next = smem.work(query_tile(), works);
    if constexpr (!Modifier::kDescribedLate) {
      if constexpr (!kSkips) wait_described();
      work = next;
    } else {
      work.tile = next.tile;
      work.end = next.end;
      work.row0 = next.row0;
    }
    if constexpr (kHasRuns) {
      run = smem.query_segments(query_tile(), works).run;
      // Blocks take query tiles in no fixed order: a query tile must not depend on the one before.
      careful_tiles = 0;
    }
    ++works;
    // The reductions make the values uniform. Otherwise the compiler would insert code that makes
    // every warp converge, and moves of descriptors, again and again.
    const auto same = [](int32_t& value) { value = __reduce_max_sync(0xffffffff, value); };
    same(work.tile);
    same(work.end);
    same(work.row0);
    if constexpr (Config::kMarksLast) {
      is_last_query = (work.end & QueryWork::kLast) != 0;
      work.end &= ~QueryWork::kLast;
    }
    if constexpr (kHasRuns) {
      same(run.first);
      same(run.end);
    }
    modifier.begin(work, work.row0 + warp_row);
    return work.row0 >= 0;
  }
  // Reads the rest of the description. Its latency overlaps the first scores.
  __device__ __forceinline__ void read_description() {
    if constexpr (!Modifier::kDescribedLate) return;
    if constexpr (!kSkips) wait_described();
    const QueryWork known = work;
    work = work_before(0);
    work.tile = known.tile;
    work.end = known.end;
    work.row0 = known.row0;
    modifier.describe(plan, work, work.row0 + warp_row);
  }
  __device__ __forceinline__ bool has_keys() const { return work.tile < work.end; }
  __device__ __forceinline__ void release_query() {
    arrive_warp(smem.query_empty(query_stage.stage, query_tile()));
    query_stage.advance();
  }
  // Returns the query tile that came `before` tiles before the one in `work`.
  __device__ __forceinline__ const QueryWork& work_before(int before) const {
    return smem.work(query_tile(), works - 1 - before);
  }

  __device__ __forceinline__ void wait_described() const {
    ptx::mbarrier_wait(smem.described(query_stage.stage, query_tile()), query_stage.parity);
  }

  // S = Q K^T
  __device__ __forceinline__ void wait_key() const {
    ptx::mbarrier_wait(smem.key_full(key_stage.stage), key_stage.parity);
  }
  __device__ __forceinline__ KeyTileNote key_note(int32_t tile) const {
    if constexpr (kSkips) {
      if (kHasRuns && tile + 1 >= run.first && tile + 1 < run.end) {
        return KeyTileNote(tile + 1, tile >= run.first, true);
      }
      KeyTileNote note = smem.segments->notes[key_stage.stage];
      note.packed = __reduce_max_sync(0xffffffff, note.packed);
      return note;
    } else {
      return KeyTileNote(is_last(tile) ? -1 : tile + 1, false, false);
    }
  }
  __device__ __forceinline__ void release_key() {
    arrive_warp(smem.key_empty(key_stage.stage));
    key_stage.advance(Config::kKeyGroups);
  }
  __device__ __forceinline__ void compute_scores_again(int32_t tile) {
    const BlockReader reader(smem.query(query_stage.stage, query_tile()), BlockOrder::kRowsFirst,
                             warp_row - group_row(), 0);
    warp_scores<Config, Element>(scores, smem.key(key_stage.stage), [&](uint32_t (&a)[4], int k) {
      if (kReadsQueryAgain && is_last(tile)) {
        load_query_rows<Element>(a, params.query, work_before(0).modifiers.query_ids, warp_row,
                                 plan.q_len - 1 - work.row0, params.shape.head_dim, k);
      } else {
        ptx::ldmatrix_x4(a, reader.at(0, k * 2));
      }
    });
  }
  __device__ __forceinline__ void start_scores() {
    if constexpr (Modifier::kInScores) modifier.begin_scores(scores);
    start_scores(scores, key_stage.stage);
  }
  __device__ __forceinline__ void start_scores(Scores& of, uint32_t stage) {
    ptx::wgmma_fence();
    auto query_smem = smem.query(query_stage.stage, query_tile());
    // The addend is always 0, which the compiler cannot know. Otherwise it would keep Q's
    // descriptors of all k during the loop, in registers from which wgmma cannot read them.
    if constexpr (kHasRuns && Config::kQueryStages == 1) query_smem.root += stage >> 8;
#pragma unroll
    for (int k = 0; k < kHeadSteps; ++k) {
      ScoreProduct::template ss<0, 0>(of[0], descriptor_k_major<kLowWord>(query_smem, 0, k),
                                      descriptor_k_major<kLowWord>(smem.key(stage), 0, k),
                                      k > 0 || Modifier::kInScores);
    }
    ptx::wgmma_commit_group();
  }
  template <int kOthers>
  __device__ __forceinline__ void await_scores() {
    ptx::wgmma_wait_group<kOthers>();
    ptx::wgmma_results(scores[0]);
  }

  // O += P V
  __device__ __forceinline__ void wait_value() const {
    ptx::mbarrier_wait(smem.value_full(value_stage.stage), value_stage.parity);
  }
  // Waits for the next tile of V while products are in flight. The exponentials should overlap
  // these products, but the assembler tends to move them past the wait for the products. This wait
  // prevents that: it precedes the wait for the products, and its parity depends on the sums of the
  // exponentials. It would be inverted if a sum were negative, which never happens. The vote keeps
  // the loop uniform.
  __device__ __forceinline__ void wait_next_value_after_exponentials() const {
    const uint32_t flip =
        __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
    wait_next_value(flip);
  }
  __device__ __forceinline__ void wait_next_value(uint32_t flip) const {
    const auto next = value_stage.next(Config::kKeyGroups);
    ptx::mbarrier_wait(smem.value_full(next.stage), next.parity ^ flip);
  }
  // Zeroes rows of V, before their product, whose NaN or infinities would reach the output even if
  // P is 0. The tile of V belongs to the query tile that came `before` tiles before the one in
  // `work`.
  __device__ __forceinline__ void clear_values(int32_t tile, const Range& attended,
                                               int before = 0) const;
  // kHalf: P is in float16.
  template <bool kHalf>
  __device__ __forceinline__ void start_out() {
    start_out_steps<kHalf, 0, kKeySteps>(0);
  }
  __device__ __forceinline__ void start_out() {
    if (kConverts && is_half) {
      start_out<true>();
    } else {
      start_out<false>();
    }
  }
  // Starts one of the kOutParts parts of P V, interleaved with the exponentials of the next tile.
  // All parts at once would delay another warpgroup's scores, which are needed sooner.
  static constexpr int kOutParts = Modifier::kOutParts;
  template <int kPart, bool kHalf = false>
  __device__ __forceinline__ void start_out_part(uint32_t zero) {
    start_out_steps<kHalf, kPart * kKeySteps / kOutParts, (kPart + 1) * kKeySteps / kOutParts>(
        zero);
  }
  template <bool kHalf, int kFirst, int kEnd>
  __device__ __forceinline__ void start_out_steps(uint32_t zero) {
    ptx::wgmma_fence();
    auto value_smem = smem.value(value_stage.stage);
    value_smem.root += zero;
#pragma unroll
    for (int k = kFirst; k < kEnd; ++k) {
      OutProduct<kHalf>::template rs<1>(out[0], probabilities[k],
                                        descriptor_mn_major<kLowWord>(value_smem, 0, k),
                                        k > 0 ? 1 : out_started);
    }
    ptx::wgmma_commit_group();
    out_started = 1;
  }
  template <int kPart>
  __device__ __forceinline__ void exponentials_overlapped() {
    if constexpr (kOutParts == 1) {
      exponentials();
    } else {
#pragma unroll
      for (int n = kPart * kN / kOutParts; n < (kPart + 1) * kN / kOutParts; ++n) {
        exponentials(scores[0][n]);
      }
    }
    if constexpr (kPart + 1 < kOutParts) {
      const uint32_t zero =
          __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
      start_out_part<kPart + 1>(zero);
      exponentials_overlapped<kPart + 1>();
    }
  }
  __device__ __forceinline__ void await_out() {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(out[0]);
    arrive_warp(smem.value_empty(value_stage.stage));
    value_stage.advance(Config::kKeyGroups);
  }

  __device__ __forceinline__ LogitModifiers modifiers() const {
    return LogitModifiers(params, BatchIndex(params.shape, work.batch), work.head);
  }
  __device__ __forceinline__ auto& unattended() const {
    return smem.segments->unattended[threadIdx.x / 32 - 4];
  }
  // Returns whether the band cuts into a tile, for this warpgroup's rows.
  __device__ __forceinline__ bool at_edge(int32_t tile) const {
    const Band& band = work.band;
    const int32_t col0 = tile * Config::kBlockKv, group_row0 = work.row0 + group_row();
    const int32_t valid_end = kMasks ? group_row0 + 64 : min(group_row0 + 64, band.q_len);
    return !band.all_allowed(group_row0, valid_end, col0, col0 + Config::kBlockKv) ||
           valid_end > band.q_len;
  }
  // Returns whether the band or a mask of keys cuts into a tile. If the mask has holes, also reads
  // the bits of this thread's columns.
  __device__ __forceinline__ bool is_cut(int32_t tile) {
    if constexpr (Config::kKeyMask) {
      if (work.modifiers.mask != KeyMask::kNoHoles) {
        const int32_t keys = reordered_tile<Config, kModifiers>(tile, work.attended);
        columns = key_bits(work.modifiers.mask + keys).words[threadIdx.x % 4];
        return true;
      }
      if (tile * Config::kBlockKv < work.attended.first) return true;
    }
    return at_edge(tile);
  }
  // True if rows of V in holes of a mask of keys are zeroed only in a redo. NaN and infinities in
  // them make the output NaN, and so lead to a redo (must_redo()).
  static constexpr bool kClearsHolesLate =
      Config::kKeyMask && kChecksLate<Config, kModifiers> && !kAlwaysExact;
  // Zeroes these rows of a tile.
  __device__ __forceinline__ void clear_holes(int32_t tile) const {
    const int64_t first = work.modifiers.mask;
    if (first != KeyMask::kNoHoles) {
      zero_holes<Config>(smem.value(value_stage.stage), key_bits(first + tile));
    }
  }
  // Returns the bits of a tile, counted from the first of all batches and heads.
  __device__ __forceinline__ const KeyBits& key_bits(int64_t tile) const {
    return static_cast<const KeyBits*>(params.mask.data)[tile];
  }
  // Returns whether a tile's logits must be compared with the running maxima before its
  // exponentials.
  __device__ __forceinline__ bool is_careful(int32_t tile) const {
    return (kChained && Config::kQueryStages == 1 && !kReadsQueryAgain && is_last(tile)) ||
           (Modifier::kInScores ? (careful_tiles | unready) > 0
                                : careful_tiles > 0 || !softmax.ready());
  }
  // Updates `shift` and `unready` after running maxima were set, if scores begin with the bias.
  __device__ __forceinline__ void take_maxima() {
    if constexpr (Modifier::kInScores) {
#pragma unroll
      // The same as find_shift(), a call to which would make ptxas reorder everything.
      for (int half = 0; half < 2; ++half) {
        const float maximum = softmax.maximum[0][half];
        shift[half] = maximum == minus_infinity() ? 0.0f : to_log2_units(maximum, to_log2) - kLift;
      }
      unready = softmax.ready() ? 0 : 1;
    }
  }
  // Reads the mask or bias of a later tile ahead.
  __device__ __forceinline__ void read_ahead(int32_t tile) { modifier.read_ahead(work, tile); }
  // Finds the mask's bits of tile `next`, and reads those of the tile after it.
  __device__ __forceinline__ void look_ahead(int32_t next) { modifier.look_ahead(work, next + 1); }
  __device__ __forceinline__ void find_attended_columns(bool all_allowed) {
    if constexpr (kHalfValues) return;  // clear_values() does not use them
    columns = all_allowed ? kAllBits<kN> : attended_by_warp<kN>(modifier.allowed);
  }
  // Applies the call's modifiers and band to products, which become logits except for the factor
  // to_log2. `again`: true if operands that were read ahead are no longer held.
  __device__ __forceinline__ void modify(Scores& scores, int32_t tile, bool edge,
                                         bool again = false) {
    // Stays in shared memory if few tiles need it.
    const QueryWork& described = Modifier::kInScores ? work_before(0) : work;
    const Band& band = described.band;
    const int32_t col0 = tile * Config::kBlockKv, warp_row0 = work.row0 + warp_row;
    if constexpr ((!kHasRuns && !Modifier::kBits) || Modifier::kChangesLogits) {
      modifier.modify(scores, params, described.modifiers, band, warp_row0, col0, one_segment,
                      again);
    }
    if constexpr (Modifier::kBits) {
      if (!modifier.all_allowed) modifier.forbid_all(scores);
      return;
    }
    if constexpr (kHasRuns) {
      if (!one_segment) return modifier.forbid_all(scores);
    }
    if (edge) {
      const int32_t keys =
          reordered_tile<Config, kModifiers>(tile, work.attended) * Config::kBlockKv;
      if constexpr (Config::kKeyMask) {
        const bool has_holes = work.modifiers.mask != KeyMask::kNoHoles;
        const uint32_t allowed = has_holes ? columns : kAllBits<kN>;
        forbid_columns<Config>(scores[0], allowed, band, work.attended.first, warp_row0, keys);
      } else {
        mask_edges(scores, band, warp_row0, keys);
      }
      if (kMasks && work.row0 + group_row() + 64 > band.q_len) {
        mask_rows(scores, band.q_len - warp_row0);
      }
    }
    if (kMasks && !kHalfValues && has_element_masks<kModifiers>(params)) {
      columns = attended_columns(scores);
    }
  }
  __device__ __forceinline__ bool raise_maximum() {
    const float least = modifier.least_logit();
    if constexpr (kByBits) {
      return raise_to_greatest<kByDifference>(softmax, by_bits, scores, to_log2, factor, least);
    } else if constexpr (kExactMaxima) {
      return raise_maxima<false, kByDifference>(softmax, scores, to_log2, factor, least);
    } else {
      constexpr float kSlack = kHalfValues ? kHalfSlack : OnlineSoftmax<1>::kSlack;
      return softmax.template raise_maximum<4>(scores, to_log2, {{kSlack, kSlack}}, factor, least);
    }
  }
  // Multiplies `out` by `factor`. With many columns, a vote for each half of a warp's rows costs
  // less than the multiplications that it saves (TUNING.md, "Between query tiles").
  __device__ __forceinline__ void rescale() {
    if constexpr (kModifiers == kNoModifier && Config::kValueDim > 128) {
      rescale_raised();
    } else {
      softmax.rescale(out, factor);
    }
  }
  // Leaves out each half of the warp's rows in which no running maximum has risen.
  __device__ __forceinline__ void rescale_raised() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!__any_sync(0xffffffff, factor[0][half] != 1.0f)) continue;
#pragma unroll
      for (float (&block)[4] : out[0]) {
        block[2 * half] *= factor[0][half];
        block[2 * half + 1] *= factor[0][half];
      }
    }
  }
  __device__ __forceinline__ void exponentials(float (&block)[4]) {
    if constexpr (kByDifference) {
      exponentials_of_differences(softmax, block, to_log2);
    } else {
      softmax.exponentials(block, 0, to_log2);
    }
  }
  __device__ __forceinline__ void exponentials() { exponentials(scores); }
  __device__ __forceinline__ void exponentials(Scores& of) {
    if constexpr (Modifier::kInScores) {
      exponentials_in_chains(softmax, of, to_log2, shift);
    } else if constexpr (kLift != 0) {
      float lifted[2];
      find_shift<true, kLift>(softmax, to_log2, lifted);
      exponentials_in_chains(softmax, of, to_log2, lifted);
    } else {
#pragma unroll
      for (int n = 0; n < kN; ++n) exponentials(of[0][n]);
    }
  }
  template <bool kHalf = false>
  __device__ __forceinline__ void convert() {
    convert<kHalf>(scores);
  }
  template <bool kHalf = false>
  __device__ __forceinline__ void convert(const Scores& of) {
    round_fragments<Weight<kHalf>>(probabilities, of[0]);
    if constexpr (Modifier::kDropsRounded) modifier.drop_rounded(probabilities);
  }

  // Processes the first key tile of a query tile. With kOverlapsOut, the last product of the
  // previous query tile runs at the same time; that tile's output is in `out`.
  template <bool kOverlapsOut, TileKind kKind = TileKind::kAny>
  __device__ __forceinline__ void first_tile(int32_t tile, bool of_one_segment = false);
  // Computes P of `tile` while the product of tile `last` runs, whose P is in registers. With
  // masks, sets `next_note` to the note of `tile`.
  template <TileKind kKind = TileKind::kAny>
  __device__ __forceinline__ void next_tile(int32_t last, int32_t tile, bool of_one_segment = false,
                                            KeyTileNote* next_note = nullptr);

  // Starts a tile's scores, unless the modifier's attend_rest() has done so.
  template <TileKind kKind>
  __device__ __forceinline__ void start_next_scores(int32_t tile);
  // Starts the last tile's product.
  template <TileKind kKind>
  __device__ __forceinline__ void start_last_out(int32_t last, int32_t tile, bool inner,
                                                 bool of_one_segment, KeyTileNote* next_note);
  // If all logits are computed before the exponentials (`whole`), applies the modifier. If
  // `careful`, compares the logits with the running maxima, and sets `rises` if some of these rise.
  __device__ __forceinline__ void apply(int32_t tile, bool edge, bool inner, bool whole,
                                        bool careful, bool& rises);
  // Computes a tile's exponentials, interleaved with the modifier unless `whole`, and prepares the
  // next tile's mask. Sets `great` if products were too great (ForwardModifier::judge()).
  __device__ __forceinline__ void exponentials(int32_t tile, bool whole, bool assumes_small,
                                               bool longer, bool& great);
  // Computes a tile's logits again after its sums were too great. `before`: the sums before the
  // tile, which are restored.
  __device__ __forceinline__ void compute_logits_again(int32_t tile, bool edge,
                                                       const float (&before)[2]);
  // The next two wait, after a tile's exponentials, for the next tile's operands. The first takes
  // `flip`, which is 0 and inverts the barrier's parity; the parity in the second depends on the
  // exponentials.
  __device__ __forceinline__ void await_next(int32_t tile, uint32_t flip) const {
    if constexpr (kWaitsAhead) {
      wait_ahead(*this, tile, 1, 1, flip);
    } else {
      wait_next_value(flip);
    }
  }
  __device__ __forceinline__ void await_next_after_exponentials(int32_t tile) const {
    if constexpr (kWaitsAhead) {
      wait_ahead_after_exponentials(*this, tile, 1, 1);
    } else {
      wait_next_value_after_exponentials();
    }
  }

  // Prepares the modifier while a tile's scores are computed.
  template <TileKind kKind>
  __device__ __forceinline__ void prepare(int32_t tile, bool edge);
  // Raises running maxima to a tile's greatest logits, after its exponentials.
  __device__ __forceinline__ void raise_to_peaks() {
    sm90::raise_to_peaks<kLift>(softmax, scores, to_log2, factor);
    take_maxima();
  }

  // Returns whether this tile is in the run of one segment.
  __device__ __forceinline__ bool in_run(int32_t tile) const {
    return tile >= run.first && tile < run.end;
  }
  // Returns whether the next tile is in it, too.
  __device__ __forceinline__ bool run_goes_on(int32_t tile) const {
    return tile >= run.first && tile + 1 < run.end;
  }
  __device__ __forceinline__ bool is_last(int32_t tile) const {
    if constexpr (kHasRuns) return note.next() < 0;
    return tile + Config::kKeyGroups >= work.end;
  }
  // If there is one stage of Q, releases it after the last scores, so that the next Q arrives
  // early.
  __device__ __forceinline__ void release_query_early(int32_t tile) {
    if (kChained && Config::kQueryStages == 1 && is_last(tile)) release_query();
  }
};

}  // namespace jax_flash::sm90
