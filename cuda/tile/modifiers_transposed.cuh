// modify_scores() of modifiers.cuh for fragments of the transposed product K Q^T.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "tile/band.cuh"
#include "tile/logits.cuh"
#include "tile/matmul.cuh"
#include "tile/modifiers.cuh"

namespace jax_flash {

// Turns products into logits in log2 units, -inf where not allowed, but for the band. The
// fragments' rows are keys from key0 on, their columns queries from row0 on.
template <int kN>
__device__ __forceinline__ void modify_transposed(float (&scores)[kN][4],
                                                  const LogitModifiers& modifiers, const Band& band,
                                                  int32_t key0, int32_t row0) {
  const Forward& params = modifiers.params;
  const Options& options = params.options;
  const Extent extent = {band.kv_len, band.q_len};
  const auto hide = [&](int n, int half, bool first, bool second) {
    if (first) scores[n][2 * half] = minus_infinity();
    if (second) scores[n][2 * half + 1] = minus_infinity();
  };
  const auto multiply = [&](float factor) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] *= factor;
    }
  };
  const bool natural = params.bias || options.logits_soft_cap > 0.0f;
  multiply(natural ? options.scale : options.scale * kLog2E);
  if (natural) {
    const auto add = [&](const auto* bias) {
      for_pairs<std::remove_cvref_t<decltype(*bias)>, 4, kN>(
          bias + modifiers.bias0, params.bias.col, params.bias.row, key0, row0, extent,
          [&](int n, int half, auto first, auto second) {
            scores[n][2 * half] += to_float(first);
            scores[n][2 * half + 1] += to_float(second);
          });
    };
    if (params.bias) {
      switch (params.bias.dtype) {
        case DType::kFloat32: add(static_cast<const float*>(params.bias.data)); break;
        case DType::kBFloat16: add(static_cast<const __nv_bfloat16*>(params.bias.data)); break;
        case DType::kFloat16: add(static_cast<const __half*>(params.bias.data)); break;
      }
    }
    if (options.logits_soft_cap > 0.0f) {
      soft_cap(reinterpret_cast<float (&)[1][kN][4]>(scores), options.logits_soft_cap);
    }
    multiply(kLog2E);
  }
  if (modifiers.mask) {
    for_pairs<uint8_t, 4, kN>(
        modifiers.mask, params.mask.col, params.mask.row, key0, row0, extent,
        [&](int n, int half, uint8_t a, uint8_t b) { hide(n, half, a == 0, b == 0); });
  }
  if (modifiers.query_ids) {
    int32_t ids[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = min(key0 + fragment_row(0, 2 * half), band.kv_len - 1);
      ids[half] = modifiers.key_ids[key * params.key_value_segment_ids.row];
    }
    for_pairs<int32_t, 4, kN>(modifiers.query_ids, 0, params.query_segment_ids.row, key0, row0,
                              extent, [&](int n, int half, int32_t a, int32_t b) {
                                hide(n, half, a != ids[half], b != ids[half]);
                              });
  }
}

}  // namespace jax_flash
