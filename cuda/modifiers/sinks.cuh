// Reads sinks: a logit for each query head that has no value. It takes part in the normalization of
// every row of its head: l = sum of exp(logits - m) + exp(sink - m), lse = m + log l.
// OnlineSoftmax::finish() (tile/softmax.cuh) adds it after the last key. The backward kernels use
// lse, and so need no sinks; the sinks' own gradient is computed by JAX (jax_flash/autodiff.py).
#pragma once

#include "tile/softmax.cuh"

namespace jax_flash {

// Returns a head's sink, or -inf if the call has none; `sink` is read only if `has_sinks`. The
// result is in log2 units if `in_log2`, else in natural units.
__device__ __forceinline__ float read_sink(bool has_sinks, const float* sink, bool in_log2 = true) {
  if (!has_sinks) return minus_infinity();
  return in_log2 ? *sink * kLog2E : *sink;
}

}  // namespace jax_flash
