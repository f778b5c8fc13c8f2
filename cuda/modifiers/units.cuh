// Defines the units of logits, and the sizes of logits that need care.
#pragma once

#include <cmath>

#include "params.h"
#include "tile/softmax.cuh"

namespace jax_flash {

// Returns whether logits are in natural units. In general calls they are if something is added to
// them; otherwise they are in log2 units. A bias may be any float32, even -3e38, whose product with
// log2(e) overflows or is rounded by far more than 1. So differences between logits, which are
// exact wherever they matter, are computed first, and the factor is applied to them.
__device__ __forceinline__ bool in_natural_units(const Forward& params) {
  return adds_to_logits(params);
}

// Beyond this magnitude, a row's lse lacks a part that gradients need; lse_low holds it. Up to this
// magnitude, that part is less than 2^-14, as is what the sm_90 kernels' log2 units add.
inline constexpr float kExtremeLse = 1024.0f;
__device__ __forceinline__ bool is_extreme(float lse) {
  return fabsf(lse) > kExtremeLse && fabsf(lse) != -minus_infinity();
}

// Some kernels take a logit below kLeastLogit for -inf, and take no special care of logits above
// kExtremeLse. They are right where a row's greatest logit is within these bounds and far from the
// lower one, and where all of its logits are -inf. A row's lse shows whether this holds: it is
// kLowLse where some finite logit was taken for -inf and no greater one followed.
inline constexpr float kLeastLogit = -1024.0f, kLowLse = -3.0e38f;
__device__ __forceinline__ bool needs_exact_logits(float lse) {
  const bool moderate = lse >= kLeastLogit + 256.0f && lse <= kExtremeLse;
  return !moderate && lse != minus_infinity();  // true for NaN, too
}

}  // namespace jax_flash
