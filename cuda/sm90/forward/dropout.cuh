// Drops probabilities in the sm_90 forward kernels for dropout, alone or with a mask (pairs.cuh).
//
// A tile's random words are drawn while its scores are computed. Sums are those of all
// probabilities, as without dropout. Dropped probabilities are zeroed in pairs, after rounding,
// which takes half an instruction each.
#pragma once

#include <cstdint>

#include "modifiers/dropout.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "sm90/forward/config.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"

namespace jax_flash::sm90 {

// Other: defaults, or another modifier.
template <typename Config, typename Element, typename Other>
struct DropoutModifier : Other {
  using Base = Other;
  using Base::kN;
  static constexpr When kExactMaxima = When::kUnlessOptimistic;
  static constexpr bool kDropsRounded = true;

  uint32_t threshold;
  Dropout dropout;
  KeptGroups<kN> kept;

  __device__ __forceinline__ DropoutModifier(const Forward& params, const ForwardPlan& plan,
                                             const ForwardSmem<Config>& smem, int group)
      : Base(params, plan, smem, group), threshold(params.options.dropout_threshold) {}
  __device__ __forceinline__ void modify(typename Base::Scores&, const Forward&,
                                         const ModifierOffsets&, const Band&, int32_t, int32_t,
                                         bool, bool) const {}
  __device__ __forceinline__ void begin(const QueryWork& work, int32_t row0) {
    Base::begin(work, row0);
    dropout = work.modifiers.dropout.uniform();
  }
  __device__ __forceinline__ void prepare(const QueryWork& work, int32_t row0, int32_t tile,
                                          bool edge) {
    Base::prepare(work, row0, tile, edge);
    dropout.template draw_all<kN, false>(kept, threshold, row0, tile * Config::kBlockKv);
  }

  // Zeroes dropped elements among rounded probabilities.
  __device__ __forceinline__ void drop_rounded(uint32_t (&pairs)[kN / 2][4]) const {
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const auto verdict = [&](int e) { return kept[k][e].word[i % 2]; };
        pairs[k][i] &= i < 2 ? sign_pair<0x99, 0xdd>(verdict(0), verdict(1))
                             : sign_pair<0xbb, 0xff>(verdict(0), verdict(1));
      }
    }
  }

 private:
  // Returns a mask of two halves. Each repeats the sign bit of one byte of a word; the selectors
  // choose the bytes.
  template <uint32_t kLow, uint32_t kHigh>
  static __device__ __forceinline__ uint32_t sign_pair(uint32_t low, uint32_t high) {
    uint32_t mask;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(mask) : "r"(low), "r"(high), "n"(kHigh << 8 | kLow));
    return mask;
  }
};

template <typename Config, typename Element>
using DropoutAlone = DropoutModifier<Config, Element, ModifierDefaults<Config, Element, kDropout>>;
template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kDropout> : DropoutAlone<Config, Element> {
  using DropoutAlone<Config, Element>::DropoutAlone;
};

}  // namespace jax_flash::sm90
