// Applies LogitModifiers to whole tiles of a warp: does what apply() does, one feature at a time.
// Neighbours are loaded together, and a feature that a call lacks costs one branch per tile.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/logits.cuh"
#include "modifiers/pairs.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "tile/matmul.cuh"

namespace jax_flash {

inline constexpr float kTanhRange = 0.75f;

// Returns whether a call has a modifier. If a kernel is made for that modifier alone, every call of
// the kernel has it.
template <uint32_t kModifiers, uint32_t kModifier>
__device__ __forceinline__ bool has_modifier(bool in_call) {
  if constexpr ((kModifiers & kModifier) == 0) return false;
  return kModifiers == kModifier || in_call;
}

// Returns whether logits must be in natural units. Otherwise the softmax scales the products, which
// it can do only by a positive factor.
__host__ __device__ __forceinline__ bool has_natural_logits(const Forward& params) {
  const Options& options = params.options;
  return params.bias || options.logits_soft_cap > 0.0f || !(options.scale > 0.0f);
}
// Returns whether the modifiers may forbid single elements.
template <uint32_t kModifiers>
__device__ __forceinline__ bool has_element_masks(const Forward& params) {
  return has_modifier<kModifiers, kMask>(bool{params.mask}) ||
         has_modifier<kModifiers, kSegments>(bool{params.query_segment_ids});
}

// Replaces logits / cap by logits after the soft cap. With kBiased, -inf stays, since a bias of
// -inf forbids.
template <bool kBiased = false, int kN>
__device__ __forceinline__ void soft_cap_ratios(float (&ratios)[1][kN][4], float cap) {
  float greatest = 0.0f;  // fmaxf ignores NaN; the polynomial propagates it
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) greatest = fmaxf(greatest, fabsf(ratios[0][n][e]));
  }
  if (__all_sync(0xffffffff, greatest <= kTanhRange)) {  // holds for most tiles
    // Approximates tanh(x) / x for |x| <= kTanhRange by a polynomial in x^2, which gives tanh to
    // within 4e-8 without a special function. Fitted by Chebyshev interpolation.
    constexpr int kTerms = 6;
    const float factor[kTerms] = {0.999999986f * cap,  -0.333330298f * cap, 0.133261829f * cap,
                                  -0.053377547f * cap, 0.019643430f * cap,  -0.004756069f * cap};
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& ratio = ratios[0][n][e];
        const float square = ratio * ratio;
        float sum = factor[kTerms - 1];
#pragma unroll
        for (int i = kTerms - 2; i >= 0; --i) sum = fmaf(sum, square, factor[i]);
        ratio *= sum;
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& ratio = ratios[0][n][e];
        const float logit = cap * tanh_accurate(ratio);
        ratio = kBiased && ratio == minus_infinity() ? ratio : logit;
      }
    }
  }
}

// Keeps finite logits with a bias finite where they are divided by a cap below 1.
template <int kN>
__device__ __forceinline__ void keep_finite(float (&logits)[1][kN][4], const Forward& params) {
  if (params.options.logits_soft_cap >= 1.0f) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& logit = logits[0][n][e];
      if (logit != minus_infinity()) logit = fminf(fmaxf(logit, -1e30f), 1e30f);
    }
  }
}

template <bool kBiased, int kN>
__device__ __forceinline__ void soft_cap(float (&logits)[1][kN][4], float cap) {
  const float inverse = 1.0f / cap;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) logits[0][n][e] *= inverse;
  }
  soft_cap_ratios<kBiased>(logits, cap);
}

// Holds the offsets, in elements, of a batch and head in operands of at most two batch axes.
// Computed once per query tile, without the divisions of BatchIndex, which are function calls.
struct ModifierOffsets {
  int64_t bias, mask, query_ids, key_ids;

  ModifierOffsets() = default;
  __device__ __forceinline__ ModifierOffsets(const Forward& params, const int32_t (&batch)[2],
                                             int32_t head) {
    const auto offset = [&](const Operand& operand) {
      return batch[0] * operand.batch[0] + batch[1] * operand.batch[1] + head * operand.head;
    };
    bias = offset(params.bias);
    mask = offset(params.mask);
    query_ids = offset(params.query_segment_ids);
    key_ids = offset(params.key_value_segment_ids);
  }
};

// Turns a warp's products into logits, -inf where not allowed, except for the band. They are in
// natural units if has_natural_logits(), and otherwise unscaled. `one_segment`: the tile's ids are
// all equal.
template <uint32_t kModifiers, int kN>
__device__ __forceinline__ void modify_scores(float (&scores)[1][kN][4], const Forward& params,
                                              const ModifierOffsets& offsets, const Band& band,
                                              int32_t row0, int32_t col0, bool one_segment) {
  // Pairs of elements that are loaded at the same time: a kernel for few modifiers has the
  // registers.
  constexpr int kInFlight = kModifiers == kEveryModifier ? 4 : kN;
  const Options& options = params.options;
  const bool has_bias = has_modifier<kModifiers, kBias>(bool{params.bias});
  const bool capped = has_modifier<kModifiers, kSoftCap>(options.logits_soft_cap > 0.0f);
  const bool any_scale = has_modifier<kModifiers, kAnyScale>(!(options.scale > 0.0f));
  const bool by_segment =
      has_modifier<kModifiers, kSegments>(bool{params.query_segment_ids}) && !one_segment;
  const Extent extent = {band.q_len, band.kv_len};
  if (has_bias) {
    const float scale = options.scale;
    const auto add = [&](const auto* data) {
      for_pairs<std::remove_cvref_t<decltype(*data)>, kInFlight, kN>(
          data + offsets.bias, params.bias.row, params.bias.col, row0, col0, extent,
          [&](int n, int half, auto first, auto second) {
            float& x = scores[0][n][2 * half];
            float& y = scores[0][n][2 * half + 1];
            x = fmaf(x, scale, to_float(first));
            y = fmaf(y, scale, to_float(second));
          });
    };
    switch (params.bias.dtype) {
      case DType::kFloat32: add(static_cast<const float*>(params.bias.data)); break;
      case DType::kBFloat16: add(static_cast<const __nv_bfloat16*>(params.bias.data)); break;
      case DType::kFloat16: add(static_cast<const __half*>(params.bias.data)); break;
    }
  }
  if (capped || (!has_bias && any_scale)) {
    const float cap = options.logits_soft_cap;
    const float scale = has_bias ? 1.0f : options.scale;
    const float factor = capped ? __fdividef(scale, cap) : scale;  // not a function call
    if (capped && has_bias) keep_finite(scores, params);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][n][e] *= factor;
    }
    if (capped) soft_cap_ratios<(kModifiers & kBias) != 0>(scores, cap);
  }
  if (has_modifier<kModifiers, kMask>(bool{params.mask})) {
    for_pairs<uint8_t, kInFlight, kN>(static_cast<const uint8_t*>(params.mask.data) + offsets.mask,
                                      params.mask.row, params.mask.col, row0, col0, extent,
                                      [&](int n, int half, uint8_t first, uint8_t second) {
                                        if (!first) scores[0][n][2 * half] = minus_infinity();
                                        if (!second) scores[0][n][2 * half + 1] = minus_infinity();
                                      });
  }
  if (by_segment) {
    const auto* query_ids =
        static_cast<const int32_t*>(params.query_segment_ids.data) + offsets.query_ids;
    const auto* key_ids =
        static_cast<const int32_t*>(params.key_value_segment_ids.data) + offsets.key_ids;
    int32_t ids[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(row0 + fragment_row(0, 2 * half), extent.rows - 1);
      ids[half] = query_ids[row * params.query_segment_ids.row];
    }
    for_pairs<int32_t, kInFlight, kN>(key_ids, 0, params.key_value_segment_ids.row, row0, col0,
                                      extent, [&](int n, int half, int32_t first, int32_t second) {
                                        if (first != ids[half])
                                          scores[0][n][2 * half] = minus_infinity();
                                        if (second != ids[half])
                                          scores[0][n][2 * half + 1] = minus_infinity();
                                      });
  }
}

}  // namespace jax_flash
