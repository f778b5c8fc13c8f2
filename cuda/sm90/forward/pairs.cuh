// Combines two modifiers in the sm_90 forward kernel, where models use both.
//
// Segments or a mask decide which pairs are allowed. In tiles that forbid nothing, the soft cap's
// exponentials are those of soft_cap.cuh without saturated squares. In other tiles, logits are
// computed exactly, and then forbidden. A bias and slopes are added to all logits first.
#pragma once

#include <cstdint>

#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "ptx/global.cuh"
#include "sm90/forward/dropout.cuh"
#include "sm90/forward/mask.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/segments.cuh"
#include "sm90/forward/slopes.cuh"
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

// Adds a bias or ALiBi slopes to all logits of a tile before segments forbid some.
template <typename Config, typename Element, uint32_t kAdded>
struct AddBesideSegments : SegmentsModifier<Config, Element, kSegments | kAdded> {
  using Base = SegmentsModifier<Config, Element, kSegments | kAdded>;
  using Base::Base;
  static constexpr bool kChangesLogits = true;

  __device__ __forceinline__ float least_logit() const { return kLeastLogit; }
};

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kSegments | kBias>
    : AddBesideSegments<Config, Element, kBias> {
  using Base = AddBesideSegments<Config, Element, kBias>;

  const Operand& bias;
  int32_t q_len, kv_len;

  __device__ __forceinline__ ForwardModifier(const Forward& forward, const ForwardPlan& planned,
                                             const ForwardSmem<Config>& smem, int group)
      : Base(forward, planned, smem, group),
        bias(forward.bias),
        q_len(planned.q_len),
        kv_len(planned.kv_len) {}

  // Prefetches a line of each half of the warp's rows of the bias to L2, while the scores are
  // computed.
  __device__ __forceinline__ void prepare(const QueryWork& work, int32_t row0, int32_t tile, bool) {
    const int lane = threadIdx.x % 32, bytes = bias.dtype == DType::kFloat32 ? 4 : 2;
    const int32_t row = min(row0 + lane / 2, q_len - 1);
    const int32_t col = tile * Config::kBlockKv + lane % 2 * Config::kBlockKv / 2;
    if (col >= kv_len) return;
    const int64_t index = work.modifiers.bias + row * bias.row + col * bias.col;
    ptx::prefetch_l2(static_cast<const uint8_t*>(bias.data) + index * bytes);
  }
  __device__ __forceinline__ void modify(typename Base::Scores& scores, const Forward& params,
                                         const ModifierOffsets& offsets, const Band& band,
                                         int32_t row0, int32_t col0, bool, bool) const {
    modify_scores<kBias>(scores, params, offsets, band, row0, col0, true);
  }
};

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kSegments | kDistance>
    : AddBesideSegments<Config, Element, kDistance> {
  using Base = AddBesideSegments<Config, Element, kDistance>;
  using Base::Base;

  __device__ __forceinline__ void modify(typename Base::Scores& scores, const Forward& params,
                                         const ModifierOffsets& offsets, const Band&, int32_t row0,
                                         int32_t col0, bool, bool) const {
    add_slope(scores[0], offsets.distance, params.options.scale, row0, col0);
  }
};

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

}  // namespace jax_flash::sm90
