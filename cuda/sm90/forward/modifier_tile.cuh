// Applies a tile's modifier in kernels for a single one: reads ahead, prepares what can be known
// before the scores are computed, and overlaps the rest with the exponentials.
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/shared.cuh"
#include "sm90/forward/bias.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers>
struct ModifiedTile {
  static constexpr int kN = Config::kBlockKv / 8;
  // True if the modifier is bits: what is allowed is known before the scores are.
  static constexpr bool kBits = kModifiers == kMask;
  static constexpr bool kBiased = kModifiers == kBias, kCapped = kModifiers == kSoftCap;
  // True if the soft cap saturates squares, and running maxima are 0 where it lets them.
  static constexpr bool kSaturates =
      kCapped && std::is_same_v<Element, __nv_bfloat16> && Config::kOptimistic;
  // True if the usual tiles then have their own code, fixed_tiles(): where that is faster.
  static constexpr bool kFixedTiles =
      kSaturates && Config::kHeadDim == 64 && Config::kBlockKv == 128;
  // The number of blocks whose elements are forbidden together, and the method: chosen by
  // measurement.
  static constexpr int kForbidBlocks =
      Config::kMaskWords && Config::kHeadDim != 128 ? 4 : Config::kHeadDim / 64;
  static constexpr bool kAddsInfinity = kBits && Config::kMaskWords;
  using Scores = float[1][kN][4];

  const Forward& params;
  const ForwardPlan& plan;
  // True for a bias that is read ahead in boxes: 2-byte elements have the operands' type.
  static constexpr bool kBoxes = kBiased && Config::kBiasBoxes;
  using BiasType = std::conditional_t<kBoxes, Element, float>;
  std::conditional_t<kBoxes, BiasBox<Config::kBlockKv>, BiasTile<kN>> bias;
  static constexpr bool kInScores = kBoxes && Config::kBiasInScores;
  static constexpr int kEarlyLoads = 2;
  uint32_t first_words[kEarlyLoads][4];
  typename BiasTile<kN>::Rows bias_rows;
  int bias_reads_ahead;
  // The mask's bits for the tile after the next one.
  std::conditional_t<Config::kMaskWords, MaskPair, MaskBytes<kN>> mask;
  AllowedBits allowed, next_allowed;
  bool all_allowed, next_all_allowed;
  // The share of a soft cap polynomial's limit that greatest products may reach when it is chosen.
  static constexpr float kMargin = 0.8f;
  // The number of terms of the chosen polynomial: 2, 3, with kSaturates 5, or 0 if they were too
  // few. With kSaturates, unless it is 0, all of the warp's running maxima are 0.
  int cap_terms;
  float factors[2];  // kSaturates: coefficients of the polynomial of two terms

  __device__ __forceinline__ ModifiedTile(const Forward& forward, const ForwardPlan& planned,
                                          const ForwardSmem<Config>& smem, int group)
      : params(forward), plan(planned) {
    if constexpr (kBiased) {  // moves it to a register: a constant would be loaded for each tile
      bias_reads_ahead = __reduce_max_sync(0xffffffff, plan.modifiers.vectors);
    }
    if constexpr (kBoxes) {
      bias.template init<kInScores>(smem.own(group * 4), smem.bias_full(group),
                                    smem.bias_empty(group), params.bias.row == 0);
    } else if constexpr (kBiased) {
      bias.init(smem.own(threadIdx.x / 32 - 4));
    }
    if constexpr (Config::kMaskWords) ptx::griddepcontrol_wait();
    if constexpr (kCapped) {
      const SoftCapPlan& cap = plan.modifiers.soft_cap;
      cap_terms = cap.two.limit > 0.0f ? 2 : cap.three.limit > 0.0f ? 3 : 0;
      if constexpr (kSaturates) {
        // Reductions keep them in registers: loads from the constant bank would delay the
        // exponentials of every tile after its scores.
        const auto keep = [](float value) {
          return __uint_as_float(__reduce_max_sync(0xffffffff, __float_as_uint(value)));
        };
        factors[0] = keep(cap.two.factor[0]);
        factors[1] = keep(cap.two.factor[1]);
      }
    }
  }

  // Fixes the running maximum at 0 for rows that have all had some logits of moderate size: P is up
  // to e^kMostLogit then, and a row's only remaining state is its sum. Called where running maxima
  // rose, and none had been fixed. `factor`: for what was computed with the previous ones.
  __device__ __forceinline__ void fix_reference(OnlineSoftmax<1>& softmax, float to_log2,
                                                float (&factor)[1][2]) {
    float (&reference)[2] = softmax.reference[0];
    // Greater logits may follow, and a tile that is redone takes long.
    const auto takes = [&](const SoftCapPolynomial& cap) {
      return __all_sync(0xffffffff,
                        fminf(reference[0], reference[1]) >= cap.least_logit &&
                            fmaxf(reference[0], reference[1]) <= kMargin * cap.greatest_logit);
    };
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    cap_terms = takes(cap.two) ? 2 : takes(cap.three) ? 3 : takes(cap.five) ? 5 : 0;
    if (cap_terms == 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float rise = ptx::ex2_approx_ftz(to_log2_units(reference[half], to_log2));
      softmax.sum[0][half] *= rise;
      factor[0][half] *= rise;
      reference[half] = 0.0f;
    }
  }
  // The next two return the limit of this thread's sums of a tile of exact logits, above which
  // running maxima rise, and how far above running maxima these logits may be, in log2 units.
  __device__ __forceinline__ float exact_sum_limit() const {
    return cap_terms == 0 ? kOptimisticLimit : plan.modifiers.soft_cap.five.greatest_sum;
  }
  __device__ __forceinline__ float slack(float to_log2) const {
    if (!kSaturates || cap_terms == 0) return OnlineSoftmax<1>::kSlack;
    return plan.modifiers.soft_cap.five.greatest_logit * to_log2;
  }
  // Called if a tile's products, up to `greatest`, were too great for the polynomial.
  __device__ __forceinline__ void next_polynomial(float greatest) {
    const int terms = terms_for(greatest);
    cap_terms = terms > cap_terms ? terms : 0;
  }
  // Called if they were too great for two terms, which may have been replaced before.
  __device__ __forceinline__ void replace_two_terms(float greatest) {
    const int terms = cap_terms == 0 ? 0 : terms_for(greatest);
    cap_terms = terms == 0 ? 0 : max(terms, cap_terms);
  }
  __device__ __forceinline__ int terms_for(float greatest) const {
    const SoftCapPlan& cap = plan.modifiers.soft_cap;
    return greatest <= kMargin * cap.three.limit ? 3 : greatest <= kMargin * cap.five.limit ? 5 : 0;
  }

  // Returns whether the bias is read a tile ahead: if it can be read in vectors.
  __device__ __forceinline__ bool reads_ahead() const { return kBiased && bias_reads_ahead; }

  // Begins a query tile: the warp's rows are those from row0 on.
  __device__ __forceinline__ void begin(const QueryWork& work, int32_t row0) {
    if constexpr (kBits) {
      mask.begin(params.mask, work.modifiers.mask, row0, plan.q_len);
    }
    if constexpr (kBiased && !kBoxes) {
      bias_rows = BiasTile<kN>::rows(params.bias.row, row0, plan.q_len);
    }
  }
  // Reads the bias ahead, if warps copy it and there is such a tile, or the mask. For a mask the
  // tile must exist, and there are no branches.
  __device__ __forceinline__ void read_ahead(const QueryWork& work, int32_t tile) {
    if constexpr (kBits) {
      mask.load(params.mask, tile, plan.kv_len);
    } else if constexpr (kBiased && !kBoxes) {
      if (tile < 0 || !reads_ahead()) return;
      const int32_t col0 = tile * Config::kBlockKv;
      const auto* data = static_cast<const float*>(params.bias.data);
      bias.copy(data + work.modifiers.bias + col0, bias_rows, plan.kv_len - col0);
    }
  }
  // Goes on to the mask's bits of the next tile, and reads those of the tile after it.
  __device__ __forceinline__ void look_ahead(const QueryWork& work, int32_t behind) {
    if constexpr (kBits) {
      next_allowed = mask.bits();
      next_all_allowed = all_of(next_allowed);
      read_ahead(work, min(behind, work.end - 1));
    }
  }
  // Prepares a tile before its scores are computed.
  __device__ __forceinline__ void prepare(const QueryWork& work, int32_t row0, int32_t tile,
                                          bool edge) {
    if constexpr (kBits) {
      const Band& band = work.band;
      allowed = next_allowed;
      all_allowed = next_all_allowed;
      if (edge) {
        forbid_edges(allowed, band, row0, tile * Config::kBlockKv);
        // A warp none of whose rows exist gets all keys: otherwise it would never have running
        // maxima, and would search V in each tile (clear_unattended()).
        if (row0 >= band.q_len) allowed.row[0] = allowed.row[1] = kAllBits<kN>;
        all_allowed = all_of(allowed);
      }
    } else if constexpr (kBiased) {
      if (!kInScores && reads_ahead()) bias.wait();
    }
  }
  static __device__ __forceinline__ bool all_of(const AllowedBits& bits) {
    return __all_sync(0xffffffff, (bits.row[0] & bits.row[1]) == kAllBits<kN>);
  }

  __device__ __forceinline__ void forbid_all(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kN; n += kForbidBlocks) forbid<kForbidBlocks>(scores[0], allowed, n);
  }
  // Sets what products are added to. Without boxes it is arbitrary, and the products replace it.
  __device__ __forceinline__ void begin_with_bias(Scores& scores) {
    if (reads_ahead()) bias.wait();
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      bias.template read<BiasType>(reinterpret_cast<float (&)[2][4]>(scores[0][n]), n);
    }
  }
  // Adds the bias that was read ahead.
  __device__ __forceinline__ void add_bias(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float addends[2][4];
      bias.template read<BiasType>(addends, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[0][n + e / 4][e % 4];
        score = fmaf(score, params.options.scale, addends[e / 4][e % 4]);
      }
    }
  }
  // Waits for a tile's bias, and starts the loads that biased_exponentials() needs first: after the
  // wait for the scores, it would have to wait for them. Starting more of them takes longer than it
  // saves.
  __device__ __forceinline__ void wait_bias() {
    bias.wait();
    if constexpr (kBoxes) {
#pragma unroll
      for (int i = 0; i < kEarlyLoads; ++i) bias.load(first_words[i], 2 * i);
    }
  }
  __device__ __forceinline__ void read_bias(float (&addends)[2][4], int n) const {
    if constexpr (kBoxes) {
      if (n < 2 * kEarlyLoads) {
        return bias.template unpack<BiasType>(first_words[n / 2], addends, n);
      }
    }
    bias.template read<BiasType>(addends, n);
  }
  // Computes exponentials of products with the bias added. Every row has a running maximum, whose
  // exponential is 2^kLift.
  template <int kLift>
  __device__ __forceinline__ void biased_exponentials(Scores& scores,
                                                      OnlineSoftmax<1>& softmax) const {
    const float factor = plan.products_to_log2;  // if computed here, it would occupy a register
    float shift[2];
    find_shift<false, kLift>(softmax, kLog2E, shift);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float addends[2][4];
      read_bias(addends, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[0][n + e / 4][e % 4];
        const float offset = fmaf(addends[e / 4][e % 4], kLog2E, -shift[e % 4 / 2]);
        score = ptx::ex2_approx_ftz(fmaf(score, factor, offset));
        softmax.sum[0][e % 4 / 2] += score;
      }
    }
  }
  // Computes exponentials of a tile that no edge cuts, together with the modifier: in one basic
  // block, in which the assembler interleaves them. `longer`: uses the longer polynomial of the
  // soft cap. Returns whether products are too great for it. `beside`, which receives whether the
  // mask allows all, is interleaved, too.
  template <int kLift = 0, typename Beside>
  __device__ __forceinline__ bool exponentials(Scores& scores, OnlineSoftmax<1>& softmax,
                                               float to_log2, bool longer, Beside beside) {
    if constexpr (kBits) {
      float shift[2];
      find_shift<true, kLift>(softmax, to_log2, shift);
      const auto all = [&](auto all_are_allowed) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          if (n == kN / 4) beside(all_are_allowed());
          if (!all_are_allowed() && n % kForbidBlocks == 0) {
            if constexpr (kAddsInfinity) {
              forbid_finite<kForbidBlocks>(scores[0], allowed, n);
            } else {
              forbid<kForbidBlocks>(scores[0], allowed, n);
            }
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& score = scores[0][n][e];
            score = ptx::ex2_approx_ftz(fmaf(score, to_log2, -shift[e / 2]));
            softmax.sum[0][e / 2] += score;
          }
        }
      };
      if (all_allowed) {
        all(std::true_type{});
      } else {
        all(std::false_type{});
      }
    } else if constexpr (kCapped) {
      const SoftCapPlan& cap = plan.modifiers.soft_cap;
      float shift[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float reference = softmax.reference[0][half];
        shift[half] = reference == minus_infinity() ? 0.0f : to_log2_units(reference, to_log2);
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
    return false;
  }
  // Computes exponentials of products as they come, with running maxima of 0 and two terms.
  __device__ __forceinline__ void two_term_exponentials(Scores& scores, float (&sum)[2]) const {
    SoftCapPolynomial two;
    two.factor[0] = factors[0];
    two.factor[1] = factors[1];
#pragma unroll
    for (int n = 0; n < kN; ++n) soft_cap_exponentials<2>(scores[0][n], two, sum);
  }
  // Does the same with as many terms as are chosen. Returns the limit for this thread's sums of
  // such a tile above which it is redone.
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

}  // namespace jax_flash::sm90
