// Defines the units of logits, and the magnitudes of logits that need care.
#pragma once

#include <cmath>

#include "params.h"
#include "tile/softmax.cuh"

namespace jax_flash {

// Returns true if logits are in natural units. In general calls, they are if something is added to
// them; otherwise they are in log2 units. A bias may be any float32, even -3e38. Its product with
// log2(e) overflows or is rounded by far more than 1. Therefore differences of logits, which are
// exact wherever they matter, are computed first, and multiplied by the factor then.
__device__ __forceinline__ bool in_natural_units(const Forward& params) {
  return adds_to_logits(params);
}

// Beyond this magnitude, a row's lse lacks a part that gradients need; lse_low holds that part. Up
// to this magnitude, it is less than 2^-14, as is the error that log2 units add in the sm_90
// kernels.
inline constexpr float kExtremeLse = 1024.0f;
__device__ __forceinline__ bool is_extreme(float lse) {
  return fabsf(lse) > kExtremeLse && fabsf(lse) != -minus_infinity();
}

// Some kernels treat a logit below kLeastLogit as -inf, and do not treat logits above kExtremeLse
// specially. Their results are right if a row's greatest logit is within these bounds and far from
// the lower one, and also if all of its logits are -inf. A row's lse shows whether this holds: it
// is kLowLse if a finite logit was treated as -inf and no greater one followed, or if the running
// maximum is above kExtremeLse.
inline constexpr float kLeastLogit = -1024.0f, kLowLse = -3.0e38f;
__device__ __forceinline__ bool needs_exact_logits(float lse) {
  const bool moderate = lse >= kLeastLogit + 256.0f && lse <= kExtremeLse;
  return !moderate && lse != minus_infinity();  // true for NaN, too
}

}  // namespace jax_flash
