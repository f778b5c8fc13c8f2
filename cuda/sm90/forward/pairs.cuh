// Combines two modifiers in the sm_90 forward kernel, where models use both.
//
// Segments or a mask decide which pairs are allowed. In tiles that forbid nothing, the soft cap's
// exponentials are those of soft_cap.cuh without saturated squares. In other tiles, logits are
// computed exactly, and then forbidden.
#pragma once

#include <cstdint>

#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "sm90/forward/dropout.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/segments.cuh"
#include "sm90/forward/soft_cap.cuh"
#include "tile/band.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Caps logits beside a modifier that forbids some.
template <typename Config, typename Element, typename Other>
struct CapBeside : SoftCapModifier<Config, Element, Other, false> {
  using Cap = SoftCapModifier<Config, Element, Other, false>;
  using Cap::Cap;
  static constexpr When kExactMaxima = When::kNever;

  __device__ __forceinline__ void modify(typename Cap::Scores& scores, const Forward& params,
                                         const ModifierOffsets& offsets, const Band& band,
                                         int32_t row0, int32_t col0, bool, bool) const {
    modify_scores<kSoftCap>(scores, params, offsets, band, row0, col0, true);
  }
};

template <typename Config, typename Element>
using CapBesideSegments =
    CapBeside<Config, Element, SegmentsModifier<Config, Element, kSegments | kSoftCap>>;
template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kSegments | kSoftCap> : CapBesideSegments<Config, Element> {
  using CapBesideSegments<Config, Element>::CapBesideSegments;

  // Blocks take query tiles in no fixed order: a query tile must not depend on the one before.
  __device__ __forceinline__ void begin(const QueryWork&, int32_t) {
    this->cap_terms = this->fewest_terms();
  }
};
template <>
struct OffsetsOf<kSegments | kSoftCap> : OffsetsOfIds {};

template <typename Config, typename Element>
using CapBesideMask = CapBeside<Config, Element, MaskModifier<Config, Element, kMask | kSoftCap>>;
template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kMask | kSoftCap> : CapBesideMask<Config, Element> {
  using Base = CapBesideMask<Config, Element>;
  using Base::Base;

  template <int kLift = 0, typename Overlapped>
  __device__ __forceinline__ bool exponentials(typename Base::Scores& scores,
                                               OnlineSoftmax<1>& softmax, float to_log2,
                                               bool longer, Overlapped overlapped) {
    overlapped(true);
    return Base::template exponentials<kLift>(scores, softmax, to_log2, longer, overlapped);
  }
};

template <typename Config, typename Element>
using DropoutBesideMask =
    DropoutModifier<Config, Element, MaskModifier<Config, Element, kMask | kDropout>>;
template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kMask | kDropout> : DropoutBesideMask<Config, Element> {
  using DropoutBesideMask<Config, Element>::DropoutBesideMask;
};
template <>
struct OffsetsOf<kMask | kDropout> {
  static __device__ __forceinline__ void set(const Forward& params, const QueryTileIndex& q,
                                             int32_t, ModifierOffsets& offsets) {
    offsets.mask = ModifierOffsets(params, q.batch_axes, q.head).mask;
    offsets.dropout = ModifierOffsets::dropout_of(params, q.batch_axes, q.head);
  }
};

}  // namespace jax_flash::sm90
