// Implements modify_scores() of modifiers/scores.cuh for fragments of S^T = K Q^T.
#pragma once

#include <cstdint>

#include "modifiers/bias.cuh"
#include "modifiers/distance.cuh"
#include "modifiers/logits.cuh"
#include "modifiers/mask.cuh"
#include "modifiers/scores.cuh"
#include "modifiers/segments.cuh"
#include "modifiers/soft_cap.cuh"
#include "params.h"
#include "plan/modifiers.h"
#include "tile/band.cuh"

namespace jax_flash {

// Turns products into logits, -inf where not allowed; does not apply the band. The units are those
// of in_natural_units(). The fragments' rows are keys from key0 on, their columns queries from row0
// on.
//   slopes          set here if there is a soft cap
//   kManyRegisters  more elements of a bias are loaded at the same time
//   kModifiers      modifiers that a call may have; if it is a single one, every call has it
template <bool kManyRegisters, uint32_t kModifiers, int kN>
__device__ __forceinline__ void modify_transposed(float (&scores)[kN][4],
                                                  const LogitModifiers& modifiers, const Band& band,
                                                  int32_t key0, int32_t row0,
                                                  CapSlopes<kN>* slopes = nullptr) {
  const Forward& params = modifiers.params;
  const Options& options = params.options;
  const Extent extent = {band.kv_len, band.q_len};
  const auto has = [](uint32_t modifier, bool found) {
    return (kModifiers & modifier) != 0 && (kModifiers == modifier || found);
  };
  const bool caps = has(kSoftCap, options.logits_soft_cap > 0.0f);
  const bool adds = has(kBias, bool{params.bias}) || has(kDistance, modifiers.distance.present);
  const auto multiply = [&](float factor) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= factor;
    }
  };
  const bool natural = adds || caps;
  multiply(natural ? options.scale : options.scale * kLog2E);
  if (natural) {
    if (has(kBias, bool{params.bias})) {
      add_bias_transposed<kManyRegisters>(scores, params.bias, modifiers.bias0, key0, row0, extent);
    }
    if (has(kDistance, modifiers.distance.present))
      modifiers.distance.add_transposed(scores, 1.0f, key0, row0);
    if (caps) {
      if (adds) keep_finite(reinterpret_cast<float (&)[1][kN][4]>(scores), params);
      soft_cap<true>(reinterpret_cast<float (&)[1][kN][4]>(scores), options.logits_soft_cap);
      if (slopes != nullptr) slopes->set(scores, options.logits_soft_cap);
    }
    if (!adds) multiply(kLog2E);
  }
  if (has(kMask, modifiers.mask != nullptr)) {
    apply_mask_transposed(scores, params.mask, modifiers.mask, key0, row0, extent);
  }
  if (has(kSegments, modifiers.query_ids != nullptr)) {
    apply_segments_transposed(scores, params, modifiers.query_ids, modifiers.key_ids, key0, row0,
                              extent);
  }
}

}  // namespace jax_flash
