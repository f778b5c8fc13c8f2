// Applies the soft cap in the sm_90 forward kernels for a soft cap, alone or with another modifier
// (pairs.cuh). The logit of a product s is cap tanh(scale s / cap), and is approximated as s
// p(s^2). The polynomial p has two, three or five terms (SoftCapPlan).
//
// A polynomial holds up to a limit of |s|. With saturated squares (kSaturates), a warp's running
// maxima are fixed at 0, if its logits permit it. Exponentials are then computed from products
// directly, without a search for the greatest, and a sum that is too great shows that some product
// was beyond the limit. The tile is then redone.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/scores.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/modifier_plan.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "tile/band.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Computes exponentials of a block of products under the soft cap, relative to shift[] of the rows,
// and adds them to sum[]. Unless squares are saturated, `seen` collects the bits of all squares
// plus offset so far, also of NaN.
template <int kTerms, bool kSaturates>
__device__ __forceinline__ void soft_cap_exponentials(float (&block)[4],
                                                      const SoftCapPolynomial& cap,
                                                      const float (&shift)[2], float (&sum)[2],
                                                      uint32_t& seen) {
  float square[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    square[e] =
        kSaturates ? ptx::mul_sat(block[e], block[e]) : fmaf(block[e], block[e], cap.offset);
    const float polynomial = cap.template value<kTerms>(square[e]);
    block[e] = ptx::ex2_approx_ftz(fmaf(block[e], polynomial, -shift[e / 2]));
    sum[e / 2] += block[e];
  }
  if constexpr (!kSaturates) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {  // two in one instruction
      seen |= __float_as_uint(square[e]) | __float_as_uint(square[e + 1]);
    }
  }
}
// Does the same with saturated squares, relative to 0.
template <int kTerms>
__device__ __forceinline__ void soft_cap_exponentials(float (&block)[4],
                                                      const SoftCapPolynomial& cap,
                                                      float (&sum)[2]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float polynomial = cap.template value<kTerms>(ptx::mul_sat(block[e], block[e]));
    block[e] = ptx::ex2_approx_ftz(block[e] * polynomial);
    sum[e / 2] += block[e];
  }
}
// Returns whether some square in `seen` was beyond the limit.
__device__ __forceinline__ bool exceeds(uint32_t seen, float offset) {
  return (seen & ~__float_as_uint(offset) & 0x7f800000) != 0;
}

// Returns the greatest magnitude in a warp's tile, ignoring NaN.
template <int kN>
__device__ __forceinline__ float greatest_magnitude(const float (&scores)[1][kN][4]) {
  constexpr int kChains = 4;
  float chain[kChains] = {};
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) chain[e] = fmaxf(chain[e], fabsf(scores[0][n][e]));
  }
  const float value = fmaxf(fmaxf(chain[0], chain[1]), fmaxf(chain[2], chain[3]));
  // Magnitudes are not negative, so their bits have the same order as their values. The result is
  // in a uniform register.
  return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
}

// Caps logits softly: by a polynomial, if a tile's products are within its limit. Other: defaults,
// or another modifier. kSaturated: true if squares are saturated (SoftCapPlan).
template <typename Config, typename Element, typename Other, bool kSaturated>
struct SoftCapModifier : Other {
  using Base = Other;
  using Base::kN;
  using typename Base::Scores;
  static constexpr bool kApproximates = true, kJudges = true, kChangesLogits = true;
  static constexpr bool kSaturates = kSaturated;
  // True where that is faster.
  static constexpr bool kFixedTiles =
      kSaturates && Config::kHeadDim == 64 && Config::kBlockKv == 128;

  const Forward& params;
  const ForwardPlan& plan;
  // The share of a polynomial's limit up to which the greatest product may reach when the
  // polynomial is chosen.
  static constexpr float kMargin = 0.8f;
  // The number of terms of the chosen polynomial: 2, 3, with kSaturates also 5, or 0 if no
  // polynomial sufficed. With kSaturates, all of the warp's running maxima are 0 unless cap_terms
  // is 0.
  int cap_terms;
  float factors[2];  // kSaturates: coefficients of the polynomial of two terms

  __device__ __forceinline__ SoftCapModifier(const Forward& forward, const ForwardPlan& planned,
                                             const ForwardSmem<Config>& smem, int group)
      : Base(forward, planned, smem, group), params(forward), plan(planned) {
    cap_terms = fewest_terms();
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    if constexpr (kSaturates) {
      // Reductions keep the coefficients in registers: after a tile's scores, loads from the
      // constant bank would delay its exponentials.
      const auto keep = [](float value) {
        return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
      };
      factors[0] = keep(cap.two.factor[0]);
      factors[1] = keep(cap.two.factor[1]);
    }
  }

  __device__ __forceinline__ int fewest_terms() const {
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    return cap.two.limit > 0.0f ? 2 : cap.three.limit > 0.0f ? 3 : 0;
  }
  // Fixes the running maxima at 0, if all rows have had logits of moderate size. P is then at most
  // e^kMostLogit, and the sum is the only other statistic of a row. Called after running maxima
  // rose, when none had been fixed. `factor`: for the output so far, computed with the previous
  // running maxima.
  __device__ __forceinline__ void fix_maximum(OnlineSoftmax<1>& softmax, float to_log2,
                                              float (&factor)[1][2]) {
    float (&maximum)[2] = softmax.maximum[0];
    // kMargin leaves room, since greater logits may follow, and a tile that is redone takes long.
    const auto takes = [&](const SoftCapPolynomial& cap) {
      return __all_sync(0xffffffff,
                        fminf(maximum[0], maximum[1]) >= cap.least_logit &&
                            fmaxf(maximum[0], maximum[1]) <= kMargin * cap.greatest_logit);
    };
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    cap_terms = takes(cap.two) ? 2 : takes(cap.three) ? 3 : takes(cap.five) ? 5 : 0;
    if (cap_terms == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float rise = ptx::ex2_approx_ftz(to_log2_units(maximum[half], to_log2));
      softmax.sum[0][half] *= rise;
      factor[0][half] *= rise;
      maximum[half] = 0.0f;
    }
  }
  // The next two are for a tile of exact logits. They return the limit of this thread's sums, above
  // which running maxima rise, and how far above running maxima these logits may be, in log2 units.
  __device__ __forceinline__ float exact_sum_limit() const {
    return cap_terms == 0 ? kOptimisticLimit : plan.modifiers.soft_cap.five.greatest_sum;
  }
  __device__ __forceinline__ float slack(float to_log2) const {
    if (!kSaturates || cap_terms == 0) return OnlineSoftmax<1>::kSlack;
    return plan.modifiers.soft_cap.five.greatest_logit * to_log2;
  }
  // Chooses a polynomial after a tile whose products, up to `greatest`, were too great for the
  // current one.
  __device__ __forceinline__ void next_polynomial(float greatest) {
    const int terms = terms_for(greatest);
    cap_terms = terms > cap_terms ? terms : 0;
  }
  // Chooses one after products were too great for two terms, which may have been replaced before.
  __device__ __forceinline__ void replace_two_terms(float greatest) {
    const int terms = cap_terms == 0 ? 0 : terms_for(greatest);
    cap_terms = terms == 0 ? 0 : max(terms, cap_terms);
  }
  __device__ __forceinline__ int terms_for(float greatest) const {
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    return greatest <= kMargin * cap.three.limit ? 3 : greatest <= kMargin * cap.five.limit ? 5 : 0;
  }

  // If products were too `great` for some row of the warp, chooses another approximation from now
  // on, and sets `anew`, so that the tile's logits are computed again.
  __device__ __forceinline__ void reject(bool great, bool& anew) {
    if (__any_sync(0xffffffff, great)) {
      cap_terms = cap_terms == 2 ? 3 : 0;
      anew = true;
    }
  }
  template <bool kAssumes>
  __device__ __forceinline__ void judge(const Scores& scores, bool edge, bool careful, bool& whole,
                                        bool& assumes_small, bool& longer) const {
    whole = edge;
    assumes_small = kAssumes && !careful && cap_terms != 0;
    longer = cap_terms != 2;
    if (!edge && !assumes_small) {
      const float greatest = greatest_magnitude(scores);
      whole = !(greatest <= plan.modifiers.soft_cap.three.limit);
      longer = !(greatest <= plan.modifiers.soft_cap.two.limit);
    }
  }
  template <int kLift = 0, typename Overlapped>
  __device__ __forceinline__ bool exponentials(Scores& scores, OnlineSoftmax<1>& softmax,
                                               float to_log2, bool longer, Overlapped) {
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float maximum = softmax.maximum[0][half];
      shift[half] = maximum == minus_infinity() ? 0.0f : to_log2_units(maximum, to_log2);
    }
    const auto capped = [&](auto terms, const SoftCapPolynomial& polynomial) {
      uint32_t seen = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        soft_cap_exponentials<decltype(terms)::value, kSaturates>(scores[0][n], polynomial, shift,
                                                                  softmax.sum[0], seen);
      }
      return !kSaturates && exceeds(seen, polynomial.offset);
    };
    constexpr std::integral_constant<int, 2> kTwo;
    constexpr std::integral_constant<int, 3> kThree;
    if constexpr (kSaturates) {
      constexpr std::integral_constant<int, 5> kFive;
      return longer ? capped(kFive, cap.five) : capped(kThree, cap.three);
    }
    if (longer) return capped(kThree, cap.three);
    return capped(kTwo, cap.two);
  }
  // Computes exponentials from products directly, with running maxima of 0 and two terms.
  __device__ __forceinline__ void two_term_exponentials(Scores& scores, float (&sum)[2]) const {
    SoftCapPolynomial two;
    two.factor[0] = factors[0];
    two.factor[1] = factors[1];
#pragma unroll
    for (int n = 0; n < kN; ++n) soft_cap_exponentials<2>(scores[0][n], two, sum);
  }
  // Does the same with the chosen number of terms. Returns the limit of this thread's sums above
  // which such a tile is redone.
  __device__ __forceinline__ float fixed_exponentials(Scores& scores, float (&sum)[2]) const {
    const auto all = [&](auto terms, const SoftCapPolynomial& cap) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        soft_cap_exponentials<decltype(terms)::value>(scores[0][n], cap, sum);
      }
    };
    if (cap_terms == 2) {
      two_term_exponentials(scores, sum);
      return plan.modifiers.soft_cap.two.greatest_sum;
    }
    if (cap_terms == 3) {
      all(std::integral_constant<int, 3>{}, plan.modifiers.soft_cap.three);
      return plan.modifiers.soft_cap.three.greatest_sum;
    }
    all(std::integral_constant<int, 5>{}, plan.modifiers.soft_cap.five);
    return plan.modifiers.soft_cap.five.greatest_sum;
  }
};

template <typename Config, typename Element>
using SoftCapAlone = SoftCapModifier<Config, Element, ModifierDefaults<Config, Element, kSoftCap>,
                                     std::is_same_v<Element, __nv_bfloat16> && Config::kOptimistic>;
template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kSoftCap> : SoftCapAlone<Config, Element> {
  using SoftCapAlone<Config, Element>::SoftCapAlone;
};

// Multiplies a warpgroup's rows of Q, which have arrived, by a power of two.
template <typename Consumer>
__device__ __forceinline__ void multiply_query(const Consumer& consumer) {
  const float factor = consumer.plan.modifiers.query_factor;
  if (factor == 1.0f) return;
  const auto tile = consumer.smem.query(consumer.query_stage.stage, consumer.query_tile());
  const __nv_bfloat162 factors = __float2bfloat162_rn(factor);
  constexpr int kBytes = decltype(tile)::kBytes;
  static_assert(kBytes % (16 * kWarpgroup) == 0);
#pragma unroll 4
  for (int i = 0; i < kBytes / (16 * kWarpgroup); ++i) {
    const uint32_t address =
        tile.root + tile.offset + (i * kWarpgroup + threadIdx.x % kWarpgroup) * 16;
    uint4 values = ptx::ld_shared_v4(address);
    for (uint32_t* word : {&values.x, &values.y, &values.z, &values.w}) {
      auto& pair = reinterpret_cast<__nv_bfloat162&>(*word);
      pair = __hmul2(pair, factors);
    }
    ptx::st_shared_v4(address, values);
  }
  ptx::fence_proxy_async_shared();
  ptx::barrier_sync(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup);
}

// Raises running maxima as raise_maximum() does, but finds the greatest products first and caps
// only these: the soft cap keeps the order of products.
template <typename Consumer>
__device__ __forceinline__ bool raise_capped_maximum(Consumer& consumer) {
  const Options& options = consumer.params.options;
  const float to_ratio = __fdividef(options.scale, options.logits_soft_cap);  // not a function call
  const auto& scores = consumer.scores[0];
  float greatest[1][1][4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    greatest[0][0][e] = scores[0][e];
#pragma unroll
    for (int n = 1; n < Consumer::kN; ++n) {
      greatest[0][0][e] = fmaxf(greatest[0][0][e], scores[n][e]);
    }
    greatest[0][0][e] *= to_ratio;
  }
  soft_cap_ratios(greatest, options.logits_soft_cap);
  return consumer.softmax.template raise_maximum<1>(greatest, consumer.to_log2, consumer.factor);
}

// Raises running maxima that may be fixed at 0.
template <typename Consumer>
__device__ __forceinline__ bool raise_maximum(Consumer& consumer) {
  const float slack = consumer.modifier.slack(consumer.to_log2);
  return consumer.softmax.template raise_maximum<4>(consumer.scores, consumer.to_log2,
                                                    {{slack, slack}}, consumer.factor);
}
// After running maxima rose, fixes them at 0, if possible, and sets the range of fixed tiles: those
// whose exponentials next_capped_tile() computes from products directly. No edge cuts them. The
// last tile is not one of them if its Q is not kept for a redo.
template <typename Config, typename Consumer>
__device__ __forceinline__ void fix_maxima(Consumer& consumer) {
  auto& modifier = consumer.modifier;
  modifier.fix_maximum(consumer.softmax, consumer.to_log2, consumer.factor);
  consumer.fixed =
      uncut_tiles<Config::kBlockKv>(consumer.work.band, consumer.work.row0 + consumer.group_row());
  if (Config::kQueryStages == 1) {
    consumer.fixed.end = min(consumer.fixed.end, consumer.work.end - 1);
  }
  if (modifier.cap_terms == 0) consumer.fixed.end = 0;
}

// From this many key tiles on, the logits of a query tile's first one are approximated, too.
inline constexpr int kManyTiles = 8;

// Computes the exponentials of a query tile's first key tile from its products directly, if
// possible. Returns whether it was.
template <typename Config, typename Consumer>
__device__ __forceinline__ bool first_fixed_tile(Consumer& consumer, int32_t tile, bool edge) {
  auto& modifier = consumer.modifier;
  modifier.cap_terms = consumer.fixed.end = 0;
  if (edge || consumer.work.end - tile < kManyTiles) return false;
  raise_capped_maximum(consumer);
  fix_maxima<Config>(consumer);
  if (modifier.cap_terms == 0) return false;
  modifier.fixed_exponentials(consumer.scores, consumer.softmax.sum[0]);
  return true;
}
// Called otherwise, after running maxima rose. Rows of few keys keep the greatest logit as running
// maximum, for which P is exact.
template <typename Config, typename Consumer>
__device__ __forceinline__ void fix_first_maxima(Consumer& consumer, int32_t tile, bool edge) {
  if (!edge || tile > 0) fix_maxima<Config>(consumer);
}

// Implements ForwardConsumer::next_tile(). All warps of a warpgroup must start products at the same
// place in the code, although each warp decides about its running maxima alone.
template <typename Config, typename Consumer>
__device__ __forceinline__ void next_capped_tile(Consumer& consumer, int32_t last, int32_t tile) {
  auto& modifier = consumer.modifier;
  auto& scores = consumer.scores;
  float (&sum)[2] = consumer.softmax.sum[0];
  const SoftCapPlan& cap = consumer.plan.modifiers.soft_cap;
  const bool fixed = tile >= consumer.fixed.first && tile < consumer.fixed.end;
  consumer.wait_key();
  consumer.start_scores();
  if (!fixed || last < consumer.fixed.first) consumer.clear_values(last, consumer.work.attended);
  consumer.template start_out_part<0>(0);
  consumer.template await_scores<1>();
  bool careful = false;  // logits were compared with running maxima: sums need no check
  bool rises = false;
  float before[2], limit;
  if (fixed) {
    before[0] = sum[0];
    before[1] = sum[1];
    sum[0] = sum[1] = 0.0f;
    limit = modifier.fixed_exponentials(scores, sum);
  } else {
    const bool edge = consumer.at_edge(tile);
    careful = (Config::kQueryStages == 1 && consumer.is_last(tile)) || !consumer.softmax.ready();
    consumer.release_query_early(tile);
    const float greatest = greatest_magnitude(scores);
    const bool whole = edge || !(greatest <= cap.five.limit);
    if (whole) {
      consumer.modify(scores, tile, edge);
      rises = careful && raise_maximum(consumer);
    } else {
      rises = careful && modifier.cap_terms == 0 && raise_capped_maximum(consumer);
    }
    if (rises && modifier.cap_terms == 0) {
      fix_maxima<Config>(consumer);
    } else if (rises) {
      modifier.cap_terms = consumer.fixed.end = 0;
    }
    before[0] = sum[0];
    before[1] = sum[1];
    sum[0] = sum[1] = 0.0f;
    if (whole) {
      consumer.exponentials();
    } else {
      const bool longer = !(greatest <= cap.three.limit);
      modifier.exponentials(scores, consumer.softmax, consumer.to_log2, longer, [] {});
    }
    limit = modifier.exact_sum_limit();
  }
  const bool again = !careful && __any_sync(0xffffffff, fmaxf(sum[0], sum[1]) > limit);
  sum[0] += before[0];
  sum[1] += before[1];
  // As wait_next_value_after_exponentials(), but the vote on sums makes the dependency.
  consumer.wait_next_value(again && consumer.plan.q_len < 0 ? 1 : 0);
  consumer.await_out();
  if (again && !fixed && !sums_too_great(consumer.softmax)) {
    raise_to_peaks(consumer.softmax, scores, consumer.to_log2, consumer.factor);
    rises = true;
    modifier.cap_terms = consumer.fixed.end = 0;
  } else if (again) {
    sum[0] = before[0];
    sum[1] = before[1];
    consumer.compute_scores_again(tile);
    const float greatest = greatest_magnitude(scores);
    consumer.modify(scores, tile, !fixed && consumer.at_edge(tile));
    rises = raise_maximum(consumer);
    if (rises) {
      modifier.cap_terms = 0;
    } else if (fixed) {
      modifier.next_polynomial(greatest);
    }
    if (modifier.cap_terms == 0) consumer.fixed.end = 0;
    consumer.exponentials();
  }
  consumer.release_key();
  consumer.convert();
  if (rises) consumer.rescale();
}

// Replaces fixed_tiles() if a query tile has no keys, so that no warp is two query tiles ahead.
__device__ __forceinline__ void sync_fixed_tiles() {
  ptx::barrier_sync(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup);
}

// Processes a query tile's fixed tiles after the first tile, with two terms, as long as all warps
// of the warpgroup can. This loop is separate code for the steps of these tiles alone. Returns the
// last tile done, for whose V the caller must wait.
//
// Warps must leave the loop together, since they start products together. A warp whose products
// were too great announces a tile at which all warps leave. It is far enough ahead that no warp
// reaches it without having read the announcement: its keys are copied only after the announcing
// warp has released those of the current tile. Until then, the warp may have more tiles redone.
template <typename Config, typename Consumer>
__device__ __forceinline__ int32_t fixed_tiles(Consumer& consumer, int32_t last) {
  auto& modifier = consumer.modifier;
  auto& scores = consumer.scores;
  float (&sum)[2] = consumer.softmax.sum[0];
  const bool is_first_lane = threadIdx.x % 32 == 0;
  // Query tiles use the two alternately, since some warp may still be in the loop of the previous
  // query tile.
  __shared__ int32_t ends[2][Config::kConsumers];
  const uint32_t shared_end = ptx::shared_address(&ends[consumer.works % 2][consumer.group]);
  if (is_first_lane && consumer.warp_row % 64 == 0) ptx::st_shared_b32(shared_end, INT32_MAX);
  int32_t end = consumer.fixed.end, tile = last + 1;
  const bool other = modifier.cap_terms != 2 || last < consumer.fixed.first || tile >= end;
  if (__any_sync(0xffffffff,
                 ptx::barrier_any(kZeroed + threadIdx.x / kWarpgroup, kWarpgroup, other))) {
    return last;
  }
  float limit = consumer.plan.modifiers.soft_cap.two.greatest_sum;
  for (;; ++tile) {
    int32_t announced;
    for (;; ++tile) {
      if (tile >= end) return tile - 1;
      consumer.wait_key();
      consumer.start_scores();
      consumer.wait_value();  // a branch between products: TUNING.md
      consumer.template start_out_part<0>(0);
      announced = ptx::ld_relaxed_shared_s32(shared_end);
      consumer.template await_scores<1>();
      float part[2] = {0.0f, 0.0f};
      modifier.two_term_exponentials(scores, part);
      // The branch precedes the wait for products, past which the assembler would otherwise move
      // exponentials.
      if (__any_sync(0xffffffff, fmaxf(part[0], part[1]) > limit)) [[unlikely]]
        break;
      sum[0] += part[0];
      sum[1] += part[1];
      consumer.await_out();
      end = min(end, __reduce_min_sync(0xffffffff, announced));
      consumer.release_key();
      consumer.convert();
    }
    consumer.await_out();
    end = min(end, __reduce_min_sync(0xffffffff, announced));
    consumer.compute_scores_again(tile);
    const float greatest = greatest_magnitude(scores);
    consumer.modify(scores, tile, false);
    const bool rises = raise_maximum(consumer);
    if (rises) {
      modifier.cap_terms = 0;
      limit = -1.0f;  // from now on, every tile takes the branch
    } else {
      modifier.replace_two_terms(greatest);
    }
    if (modifier.cap_terms == 0) consumer.fixed.end = 0;
    consumer.exponentials();
    if (is_first_lane) ptx::min_relaxed_shared_s32(shared_end, tile + Config::kStages + 1);
    consumer.release_key();
    consumer.convert();
    if (rises) consumer.rescale();
  }
}

}  // namespace jax_flash::sm90
