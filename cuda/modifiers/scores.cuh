// Applies modifiers to whole tiles of a warp: does what LogitModifiers::apply() does, one modifier
// at a time. Contiguous elements are loaded together, and a modifier that a call lacks costs one
// branch per tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/bias.cuh"
#include "modifiers/distance.cuh"
#include "modifiers/dropout.cuh"
#include "modifiers/logits.cuh"
#include "modifiers/mask.cuh"
#include "modifiers/pairs.cuh"
#include "modifiers/segments.cuh"
#include "modifiers/soft_cap.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Returns true if a call has a modifier. `in_call`: found at run time. If a kernel is compiled for
// this modifier alone, all of its calls have it.
template <uint32_t kModifiers, uint32_t kModifier>
__device__ __forceinline__ bool has_modifier(bool in_call) {
  if constexpr ((kModifiers & kModifier) == 0) return false;
  return kModifiers == kModifier || in_call;
}

// Returns true if logits must be in natural units. Otherwise, the softmax multiplies the products
// by the scale, which must be positive for this.
__host__ __device__ __forceinline__ bool has_natural_logits(const Forward& params) {
  const Options& options = params.options;
  return adds_to_logits(params) || options.logits_soft_cap > 0.0f || !(options.scale > 0.0f);
}
// Returns true if modifiers may forbid single elements.
template <uint32_t kModifiers>
__device__ __forceinline__ bool has_element_masks(const Forward& params) {
  return has_modifier<kModifiers, kMask>(bool{params.mask}) ||
         has_modifier<kModifiers, kSegments>(bool{params.query_segment_ids});
}

// Holds the offsets, in elements, of a batch and head in operands of at most two batch axes.
// Computed once per query tile, without the divisions of BatchIndex, which are function calls.
struct ModifierOffsets {
  int64_t bias, mask, query_ids, key_ids;
  union {
    DistanceBias distance = {};
    Dropout dropout;  // in kernels for dropout without ALiBi; a separate member would not fit
  };

  ModifierOffsets() = default;
  __device__ __forceinline__ ModifierOffsets(const Forward& params, const BatchIndex& batch,
                                             int32_t head)
      : bias(batch.offset(params.bias) + head * params.bias.head),
        mask(batch.offset(params.mask) + head * params.mask.head),
        query_ids(batch.offset(params.query_segment_ids)),
        key_ids(batch.offset(params.key_value_segment_ids)),
        distance(params, batch, head) {}
  // Returns the same offsets, but 0 for operands that the call does not have.
  static __device__ __forceinline__ ModifierOffsets of_present(const Forward& params,
                                                               const BatchIndex& batch,
                                                               int32_t head) {
    ModifierOffsets offsets = {};
    if (params.bias) offsets.bias = batch.offset(params.bias) + head * params.bias.head;
    if (params.mask) offsets.mask = batch.offset(params.mask) + head * params.mask.head;
    if (params.query_segment_ids) {
      offsets.query_ids = batch.offset(params.query_segment_ids);
      offsets.key_ids = batch.offset(params.key_value_segment_ids);
    }
    if (adds_to_logits(params)) offsets.distance = DistanceBias(params, batch, head);
    return offsets;
  }
  __device__ __forceinline__ ModifierOffsets(const Forward& params, const int32_t (&batch)[2],
                                             int32_t head) {
    const auto offset = [&](const Operand& operand) { return offset_of(operand, batch, head); };
    bias = offset(params.bias);
    mask = offset(params.mask);
    query_ids = offset(params.query_segment_ids);
    key_ids = offset(params.key_value_segment_ids);
    distance = DistanceBias(params, [&](const Operand& operand) {
      return static_cast<const float*>(operand.data) + offset(operand);  // 4 bytes an element
    });
  }

  // Returns the keys and the origin for dropout.
  static __device__ __forceinline__ Dropout dropout_of(const Forward& params,
                                                       const int32_t (&batch)[2], int32_t head) {
    return Dropout(params, [&](const Operand& operand) {
      return static_cast<const uint32_t*>(operand.data) + offset_of(operand, batch, head);
    });
  }

 private:
  static __device__ __forceinline__ int64_t offset_of(const Operand& operand,
                                                      const int32_t (&batch)[2], int32_t head) {
    return batch[0] * operand.batch[0] + batch[1] * operand.batch[1] + head * operand.head;
  }
};

// Turns a warp's products into logits, -inf where not allowed; does not apply the band. Logits are
// in natural units if has_natural_logits(), and otherwise unscaled. `one_segment`: all ids of the
// tile are equal. kPairs: pairs of elements that are loaded at the same time; 0: as registers
// allow.
template <uint32_t kModifiers, int kN, int kPairs = 0>
__device__ __forceinline__ void modify_scores(float (&scores)[1][kN][4], const Forward& params,
                                              const ModifierOffsets& offsets, const Band& band,
                                              int32_t row0, int32_t col0, bool one_segment) {
  // A kernel for few modifiers has registers for more loads in flight.
  constexpr int kInFlight = kPairs > 0 ? kPairs : kModifiers == kEveryModifier ? 4 : kN;
  const Options& options = params.options;
  const bool has_bias = has_modifier<kModifiers, kBias>(bool{params.bias});
  const bool capped = has_modifier<kModifiers, kSoftCap>(options.logits_soft_cap > 0.0f);
  const bool any_scale = has_modifier<kModifiers, kAnyScale>(!(options.scale > 0.0f));
  const bool by_segment =
      has_modifier<kModifiers, kSegments>(bool{params.query_segment_ids}) && !one_segment;
  const bool has_distance = has_modifier<kModifiers, kDistance>(offsets.distance.present);
  const bool added = has_bias || has_distance;
  const Extent extent = {band.q_len, band.kv_len};
  if (has_bias) {
    add_bias<kInFlight>(scores, params.bias, offsets.bias, options.scale, row0, col0, extent);
  }
  if (has_distance) {
    offsets.distance.add(scores[0], has_bias ? 1.0f : options.scale, row0, col0);
  }
  if (capped || (!added && any_scale)) {
    const float cap = options.logits_soft_cap;
    const float scale = added ? 1.0f : options.scale;
    const float factor = capped ? __fdividef(scale, cap) : scale;  // not a function call
    if (capped && added) keep_finite(scores, params);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][n][e] *= factor;
    }
    if (capped) soft_cap_ratios<(kModifiers & (kBias | kDistance)) != 0>(scores, cap);
  }
  if (has_modifier<kModifiers, kMask>(bool{params.mask})) {
    apply_mask<kInFlight>(scores, params.mask, offsets.mask, row0, col0, extent);
  }
  if (by_segment) {
    apply_segments<kInFlight>(scores, params, offsets.query_ids, offsets.key_ids, row0, col0,
                              extent);
  }
}

// Turns products into logits in log2 units, -inf where not allowed, for a call without modifiers.
template <int kM, int kN>
__device__ __forceinline__ void scale_tile(float (&scores)[kM][kN][4], const Forward& params,
                                           const Band& band, int32_t row0, int32_t col0) {
  const float factor = params.options.scale * kLog2E;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] *= factor;
    }
  }
  if (!band.all_allowed(row0, min(row0 + 16 * kM, band.q_len), col0, col0 + 8 * kN)) {
    mask_band(scores, band, row0, col0);
  }
}

// Does what LogitModifiers::apply() does, in the same units, one modifier at a time. kModifiers:
// those that the call may have. kSkips: skips steps that a tile does not need, which takes more
// code.
template <uint32_t kModifiers = kEveryModifier, bool kSkips = false, int kM, int kN>
__device__ __forceinline__ void modify_tile(float (&scores)[kM][kN][4], const Forward& params,
                                            const BatchIndex& batch, int32_t head, const Band& band,
                                            int32_t row0, int32_t col0) {
  const ModifierOffsets offsets = kSkips ? ModifierOffsets::of_present(params, batch, head)
                                         : ModifierOffsets(params, batch, head);
  const float factor = in_natural_units(params)     ? 1.0f
                       : has_natural_logits(params) ? kLog2E
                                                    : params.options.scale * kLog2E;
  const bool all_allowed =
      row0 + 16 * kM <= band.q_len && band.all_allowed(row0, row0 + 16 * kM, col0, col0 + 8 * kN);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    modify_scores<kModifiers, kN, kN>(reinterpret_cast<float (&)[1][kN][4]>(scores[m]), params,
                                      offsets, band, row0 + 16 * m, col0, false);
    if (kSkips && all_allowed) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] *= factor;
      }
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + fragment_row(m, 2 * half);
      const bool valid = row < band.q_len;
      const int32_t first = valid ? band.first_col(row) - col0 : 0;
      const int32_t end = valid ? band.end_col(row) - col0 : 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[m][n][2 * half + e];
          const int32_t col = fragment_col(n, e);
          const bool allowed = all_allowed || (col >= first && col < end);
          score = allowed ? score * factor : minus_infinity();
        }
      }
    }
  }
}

}  // namespace jax_flash
