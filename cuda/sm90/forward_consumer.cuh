// What a consumer warpgroup of the sm_90 forward kernel keeps in registers for its 64 rows, and the
// steps that it takes with a tile of keys and values. The order of the steps: forward.cuh.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/config.cuh"
#include "sm90/forward_modified_tile.cuh"
#include "sm90/forward_parts.cuh"
#include "sm90/forward_peaks.cuh"
#include "tile/logits.cuh"
#include "tile/modifiers.cuh"
#include "tile/softmax.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers>
struct ForwardConsumer {
  static constexpr bool kGeneral = kModifiers != kNoModifier;
  static constexpr bool kMasks = (kModifiers & (kMask | kSegments)) != 0;
  // Whether query tiles are chained, and Q is released early.
  static constexpr bool kChained = !kMasks;
  // Whether references rise to the rows' peaks: where products take so long that it costs little
  // (TUNING.md, "Errors").
  static constexpr bool kPeaks = !kGeneral && Config::kHeadDim > 128;
  static constexpr int kN = Config::kBlockKv / 8, kOutN = Config::kValueDim / 8;
  using Modified = ModifiedTile<Config, Element, kModifiers>;  // in kernels for one modifier
  static constexpr int kHeadSteps = Config::kHeadDim / 16, kKeySteps = Config::kBlockKv / 16;
  using ScoreProduct = ptx::Wgmma<Element, Config::kBlockKv>;
  using OutProduct = ptx::Wgmma<Element, Config::kValueDim>;
  using Scores = float[1][kN][4];

  const Forward& params;  // for what `plan` lacks
  const ForwardPlan& plan;
  const ForwardSmem<Config>& smem;
  int group;     // of the consumers
  int warp_row;  // of the block's rows, this warp's first
  float to_log2;

  RingState<Config::kStages> key_stage;
  RingState<Config::kValueStages> value_stage;
  RingState<Config::kQueryStages> query_stage;
  uint32_t works = 0;  // query tiles before the one in `work`
  QueryWork work;      // of the scores
  float out[1][kOutN][4];
  int out_started = 0;
  OnlineSoftmax<1> softmax;
  PeakLimits peak_limits;
  Scores scores;
  uint32_t probabilities[kKeySteps][4];
  float factor[1][2];    // by which `out` is to be multiplied if a reference rises
  uint32_t columns = 0;  // a bit per column of this thread: whether its warp attends to it
  Modified modified;

  __device__ __forceinline__ ForwardConsumer(const Forward& forward, const ForwardPlan& planned,
                                             const ForwardSmem<Config>& where)
      : params(forward),
        plan(planned),
        smem(where),
        // A reduction: in a uniform register, and so is what descriptors derive from it.
        group(__reduce_max_sync(0xffffffff, static_cast<int>(threadIdx.x) / kWarpgroup - 1)),
        warp_row(group_row() + threadIdx.x % kWarpgroup / 32 * 16),
        to_log2(planned.to_log2),
        modified(forward, planned, where, group) {}

  __device__ __forceinline__ int query_tile() const { return group % Config::kRowGroups; }
  __device__ __forceinline__ int group_row() const { return query_tile() * 64; }

  // Waits for the next query tile; false after the last one.
  __device__ __forceinline__ bool wait_query() {
    ptx::mbarrier_wait(smem.query_full(query_stage.stage, query_tile()), query_stage.parity);
    work = smem.work(query_tile(), works);
    ++works;
    // By reductions, whose results the compiler knows to be the same in all lanes: else it would
    // have every warp converge, and move descriptors, again and again.
    const auto same = [](int32_t& value) { value = __reduce_max_sync(0xffffffff, value); };
    same(work.tile);
    same(work.end);
    same(work.row0);
    modified.begin(work, work.row0 + warp_row);
    return work.row0 >= 0;
  }
  __device__ __forceinline__ bool has_keys() const { return work.tile < work.end; }
  __device__ __forceinline__ void release_query() {
    arrive_warp(smem.query_empty(query_stage.stage, query_tile()));
    query_stage.advance();
  }
  // The query tile `before` tiles before the one in `work`.
  __device__ __forceinline__ const QueryWork& work_before(int before) const {
    return smem.work(query_tile(), works - 1 - before);
  }

  // S = Q K^T
  __device__ __forceinline__ void wait_key() const {
    ptx::mbarrier_wait(smem.key_full(key_stage.stage), key_stage.parity);
  }
  // Of the key tile that was waited for.
  __device__ __forceinline__ KeyTileNote key_note(int32_t tile) const {
    KeyTileNote note(is_last(tile) ? -1 : tile + 1, false, false);
    if constexpr ((kModifiers & kSegments) != 0) {
      note = smem.notes[key_stage.stage];
      note.packed = __reduce_max_sync(0xffffffff, note.packed);
    }
    return note;
  }
  __device__ __forceinline__ void release_key() {
    arrive_warp(smem.key_empty(key_stage.stage));
    key_stage.advance(Config::kKeyGroups);
  }
  __device__ __forceinline__ void start_scores() { start_scores(scores, key_stage.stage); }
  __device__ __forceinline__ void start_scores(Scores& of, uint32_t stage) {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadSteps; ++k) {
      ScoreProduct::template ss<0, 0>(
          of[0], descriptor_k_major(smem.query(query_stage.stage, query_tile()), 0, k),
          descriptor_k_major(smem.key(stage), 0, k), k > 0);
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
  // For the next tile of V, while products are under way. The exponentials are to run beside those,
  // but the assembler likes to move them behind the wait for the products. So this wait precedes
  // it, on a parity that depends on the exponentials' sums in a way that never matters: they are
  // not negative. The vote keeps the loop uniform.
  __device__ __forceinline__ void wait_next_value_after_exponentials() const {
    const uint32_t flip =
        __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
    const auto next = value_stage.next(Config::kKeyGroups);
    ptx::mbarrier_wait(smem.value_full(next.stage), next.parity ^ flip);
  }
  // Rows of V that may not reach the output even by a product with 0, before its product.
  __device__ __forceinline__ void clear_values(int32_t tile, const RowRange& attended) const {
    const auto value_smem = smem.value(value_stage.stage);
    const auto clear = [&](auto make_allows) {
      clear_unattended<Config, Element>(value_smem, columns, make_allows, work.band, work.row0,
                                        tile);
    };
    if constexpr (Modified::kBits) {  // without the divisions of BatchIndex, which are calls
      if (!modified.all_allowed) {
        clear([&] {
          return [&](int32_t row, int32_t col) {
            return allows_element<kModifiers>(params, work.modifiers, work.band, row, col);
          };
        });
      }
    } else if (has_element_masks<kModifiers>(params)) {
      clear([&] {
        const LogitModifiers all = modifiers();
        return [all, this](int32_t row, int32_t col) { return all.allows(work.band, row, col); };
      });
    }
    zero_unattended<Config>(value_smem, tile, attended, plan.kv_len);
  }
  __device__ __forceinline__ void start_out() {
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      OutProduct::template rs<1>(out[0], probabilities[k],
                                 descriptor_mn_major(smem.value(value_stage.stage), 0, k),
                                 k > 0 ? 1 : out_started);
    }
    ptx::wgmma_commit_group();
    out_started = 1;
  }
  // One part of kOutParts, and the exponentials of the next tile among them: started all at once,
  // they would keep another warpgroup's scores waiting, which it needs sooner.
  static constexpr int kOutParts = kGeneral ? 1 : Config::kOutParts;
  template <int kPart>
  __device__ __forceinline__ void start_out_part(uint32_t zero) {
    ptx::wgmma_fence();
    auto value_smem = smem.value(value_stage.stage);
    value_smem.root += zero;
#pragma unroll
    for (int k = kPart * kKeySteps / kOutParts; k < (kPart + 1) * kKeySteps / kOutParts; ++k) {
      OutProduct::template rs<1>(out[0], probabilities[k], descriptor_mn_major(value_smem, 0, k),
                                 k > 0 ? 1 : out_started);
    }
    ptx::wgmma_commit_group();
    out_started = 1;
  }
  template <int kPart>
  __device__ __forceinline__ void exponentials_beside_out() {
#pragma unroll
    for (int n = kPart * kN / kOutParts; n < (kPart + 1) * kN / kOutParts; ++n) {
      exponentials(scores[0][n]);
    }
    if constexpr (kPart + 1 < kOutParts) {
      const uint32_t zero =
          __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
      start_out_part<kPart + 1>(zero);
      exponentials_beside_out<kPart + 1>();
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
  // Whether the band cuts into a tile, for this warpgroup's rows.
  __device__ __forceinline__ bool at_edge(int32_t tile) const {
    const Band& band = work.band;
    const int32_t col0 = tile * Config::kBlockKv, group_row0 = work.row0 + group_row();
    const int32_t valid_end = kMasks ? group_row0 + 64 : min(group_row0 + 64, band.q_len);
    return !band.all_allowed(group_row0, valid_end, col0, col0 + Config::kBlockKv) ||
           valid_end > band.q_len;
  }
  // Of mask or bias, for a tile to come, if there is one.
  __device__ __forceinline__ void read_ahead(int32_t tile) {
    modified.read_ahead(work, work.row0 + warp_row, tile);
  }
  // Of the mask: finds the bits of tile `next`, and reads those of the tile behind it.
  __device__ __forceinline__ void look_ahead(int32_t next) {
    modified.look_ahead(work, work.row0 + warp_row, next + 1);
  }
  __device__ __forceinline__ void attended_columns_of_bits() {
    columns = attended_by_warp<kN>(modified.allowed);
  }
  // What the call does to products, but for a factor of to_log2. `again`: what was read ahead is
  // gone.
  __device__ __forceinline__ void modify(Scores& scores, int32_t tile, bool edge,
                                         bool one_segment = false, bool again = false) {
    const Band& band = work.band;
    const int32_t col0 = tile * Config::kBlockKv, warp_row0 = work.row0 + warp_row;
    if constexpr (Modified::kBits) {
      modified.forbid_all(scores);
      return;
    }
    if (Modified::kBiased && !again && modified.reads_ahead()) {
      modified.add_bias(scores);
    } else if constexpr (kGeneral) {
      modify_scores<kModifiers>(scores, params, work.modifiers, band, warp_row0, col0, one_segment);
    }
    if (edge) {
      mask_edges(scores, band, warp_row0, col0);
      if (kMasks && work.row0 + group_row() + 64 > band.q_len) {
        mask_rows(scores, band.q_len - warp_row0);
      }
    }
    if (has_element_masks<kModifiers>(params)) columns = attended_columns(scores);
  }
  __device__ __forceinline__ bool raise_reference() {
    return softmax.template raise_reference<4, kPeaks>(scores, to_log2, factor);
  }
  __device__ __forceinline__ bool raise_reference_to_peak() {
    if (!kPeaks) return raise_reference();
    const float slack[1][2] = {peak_limits.slack(0), peak_limits.slack(1)};
    return softmax.template raise_reference<4, kPeaks>(scores, to_log2, slack, factor);
  }
  // After a query tile's first tile of keys.
  __device__ __forceinline__ void set_first_peak_limits(int32_t tile, bool edge) {
    float share[2] = {kFirstPeakShare, kFirstPeakShare};
    const int32_t col0 = tile * Config::kBlockKv;
#pragma unroll
    for (int half = 0; half < 2 && edge; ++half) {
      const int32_t row = work.row0 + warp_row + fragment_row(0, 2 * half);
      const int32_t end = min(work.band.end_col(row), col0 + Config::kBlockKv);
      share[half] = first_peak_share<Config::kBlockKv>(end - max(work.band.first_col(row), col0));
    }
    peak_limits.set(softmax, share);
  }
  // The same before the soft cap, which keeps the order of products.
  __device__ __forceinline__ bool raise_capped_reference() {
    const float cap = params.options.logits_soft_cap;
    const float to_ratio = __fdividef(params.options.scale, cap);  // no call
    float greatest[1][1][4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      greatest[0][0][e] = scores[0][0][e];
#pragma unroll
      for (int n = 1; n < kN; ++n) greatest[0][0][e] = fmaxf(greatest[0][0][e], scores[0][n][e]);
      greatest[0][0][e] *= to_ratio;
    }
    soft_cap_ratios(greatest, cap);
    return softmax.template raise_reference<1>(greatest, to_log2, factor);
  }
  __device__ __forceinline__ void rescale() { softmax.rescale(out, factor); }
  __device__ __forceinline__ void exponentials(float (&block)[4]) {
    if constexpr (kPeaks) {
      peak_exponentials(softmax, block, to_log2);
    } else {
      softmax.exponentials(block, 0, to_log2);
    }
  }
  __device__ __forceinline__ void exponentials() { exponentials(scores); }
  __device__ __forceinline__ void exponentials(Scores& of) {
#pragma unroll
    for (int n = 0; n < kN; ++n) exponentials(of[0][n]);
  }
  __device__ __forceinline__ void drop_some(int32_t tile) {
    if constexpr ((kModifiers & kDropout) != 0) {
      if (params.options.dropout_threshold == 0) return;
      drop<kN>(scores, modifiers(), work.row0 + warp_row, tile * Config::kBlockKv);
    }
  }
  __device__ __forceinline__ void convert() { convert(scores); }
  __device__ __forceinline__ void convert(const Scores& of) {
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&block)[4] = of[0][2 * k + i / 2];
        probabilities[k][i] = ptx::cvt_rn_x2<Element>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
      }
    }
  }

  // The first tile of a query tile: with kBesideOut, beside the last product of the one before,
  // whose output is in `out`.
  template <bool kBesideOut>
  __device__ __forceinline__ void first_tile(int32_t tile, bool one_segment = false) {
    const bool edge = at_edge(tile);
    if constexpr (Modified::kLooksAhead) look_ahead(tile);
    modified.prepare(work, work.row0 + warp_row, tile, edge, one_segment);
    if constexpr (kModifiers == kMask && !Modified::kLooksAhead) {
      read_ahead(min(tile + 1, work.end - 1));
    }
    await_scores<kBesideOut ? 1 : 0>();
    release_key();
    release_query_early(tile);
    softmax = OnlineSoftmax<1>();
    modify(scores, tile, edge, one_segment);
    if constexpr (Modified::kBiased) read_ahead(is_last(tile) ? -1 : tile + 1);
    raise_reference();
    exponentials();
    if constexpr (kPeaks) set_first_peak_limits(tile, edge);
    if constexpr (Modified::kLooksAhead) look_ahead(tile + 1);
    if constexpr (Modified::kBits) attended_columns_of_bits();
    drop_some(tile);
    if constexpr (kBesideOut) {
      wait_next_value_after_exponentials();
      await_out();
      convert();
    } else {
      convert();
      wait_value();
    }
  }

  // From the probabilities of tile `last` to those of the next, with the former's product beside.
  // With masks, `note` is set to the tile's. With a bias, next_biased_tile() has started the
  // scores; kBiasBeside: it is added beside the exponentials.
  template <bool kBiasBeside = false>
  __device__ __forceinline__ void next_tile(int32_t last, int32_t tile, bool one_segment = false,
                                            KeyTileNote* note = nullptr) {
    constexpr bool kOptimistic = Config::kOptimistic && kModifiers != kEveryModifier;
    const bool edge = !kBiasBeside && at_edge(tile);  // before the wait
    if constexpr (!Modified::kBiased) {
      wait_key();
      start_scores();
    }
    clear_values(last, work.attended);
    if constexpr (kMasks && !kOptimistic) *note = key_note(tile);
    const auto prepare = [&] {
      modified.prepare(work, work.row0 + warp_row, tile, edge, one_segment);
    };
    if constexpr (Modified::kBits && !Modified::kLooksAhead) {
      prepare();
      columns = kAllBits<kN>;
      if (!modified.all_allowed) attended_columns_of_bits();
      if constexpr (kModifiers == kMask) read_ahead(note->next());
      start_out_part<0>(0);
    } else {
      start_out_part<0>(0);
      if constexpr (kBiasBeside) {
        modified.bias.wait();
      } else {
        prepare();
      }
    }
    await_scores<1>();
    bool careful = !kBiasBeside;
    if constexpr (!kOptimistic) {
      release_key();
    } else if constexpr (!kBiasBeside) {
      careful = (kChained && Config::kQueryStages == 1 && is_last(tile)) || !softmax.ready();
    }
    if constexpr (!kBiasBeside) release_query_early(tile);
    // Whether all logits are to be there before the exponentials.
    bool whole = !kBiasBeside;
    bool assumes_small = false;  // products: the tile is done again if they are not
    bool longer = false;         // polynomial of the soft cap
    if constexpr (Modified::kBits && kOptimistic) {
      whole = careful;
    } else if constexpr (Modified::kCapped) {
      whole = edge;
      assumes_small = kOptimistic && !careful && modified.cap_terms != 0;
      longer = modified.cap_terms != 2;
      if (!edge && !assumes_small) {
        const float greatest = greatest_magnitude(scores);
        whole = !(greatest <= plan.modifiers.soft_cap.limit3);
        longer = !(greatest <= plan.modifiers.soft_cap.limit2);
      }
    }
    bool rises = false;
    if (whole) {
      modify(scores, tile, edge, one_segment);
      rises = careful && raise_reference_to_peak();
    } else if constexpr (Modified::kCapped) {
      rises = careful && raise_capped_reference();
    }
    const float before[2] = {softmax.sum[0][0], softmax.sum[0][1]};
    softmax.sum[0][0] = softmax.sum[0][1] = 0.0f;
    // What the next tile needs.
    const auto beside = [&] {
      if constexpr (kMasks && kOptimistic) *note = key_note(tile);
      if constexpr (Modified::kLooksAhead) {
        look_ahead(tile + 1);
        attended_columns_of_bits();
      }
    };
    bool great = false;
    if (whole) {
      beside();
      exponentials_beside_out<0>();
    } else if constexpr (kBiasBeside) {
      modified.biased_exponentials(scores, softmax);
    } else if constexpr (kGeneral) {
      great = modified.exponentials(scores, softmax, to_log2, longer, beside) && assumes_small;
    }
    if constexpr (Modified::kBiased) read_ahead(is_last(tile) ? -1 : tile + 1);
    const float greatest = fmaxf(softmax.sum[0][0], softmax.sum[0][1]);
    const bool exceeds = kPeaks && peak_limits.exceeded_by(softmax.sum[0]);
    softmax.sum[0][0] += before[0];
    softmax.sum[0][1] += before[1];
    wait_next_value_after_exponentials();
    await_out();
    bool peak = false;
    if constexpr (kOptimistic) {
      if (!careful &&
          __any_sync(0xffffffff, kPeaks ? exceeds : greatest > kOptimisticLimit || great)) {
        peak = kPeaks;
        if constexpr (Modified::kCapped) {
          if (__any_sync(0xffffffff, great)) modified.cap_terms = modified.cap_terms == 2 ? 3 : 0;
        }
        if (!kPeaks || peak_limits.too_great(softmax)) {
          softmax.sum[0][0] = before[0];
          softmax.sum[0][1] = before[1];
          warp_scores<Config, Element>(scores, smem.query(query_stage.stage, query_tile()),
                                       smem.key(key_stage.stage), warp_row - group_row());
          modify(scores, tile, edge, one_segment, true);
          rises = raise_reference_to_peak();
          exponentials();
        } else {
          raise_to_peaks(softmax, scores, out, to_log2);
        }
      }
      release_key();
    }
    drop_some(tile);
    convert();
    if (rises) rescale();
    if (kPeaks && (rises || peak)) peak_limits.set(softmax);
  }

  // A query tile's keys from `tile` on.
  __device__ __forceinline__ void attend(int32_t tile) {
    wait_key();
    start_scores();
    first_tile<false>(tile);
    for (; !is_last(tile); tile += Config::kKeyGroups) {
      next_tile(tile, tile + Config::kKeyGroups);
    }
    clear_values(tile, work.attended);
    start_out();
    await_out();
  }

  __device__ __forceinline__ bool is_last(int32_t tile) const {
    return tile + Config::kKeyGroups >= work.end;
  }
  // With one place for Q the next one is to come as soon as the last scores are there.
  __device__ __forceinline__ void release_query_early(int32_t tile) {
    if (kChained && Config::kQueryStages == 1 && is_last(tile)) release_query();
  }
};

}  // namespace jax_flash::sm90
