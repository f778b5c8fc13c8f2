// Implements modify_scores() of modifiers/scores.cuh for fragments of the transposed product K Q^T.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "modifiers/logits.cuh"
#include "modifiers/scores.cuh"
#include "params.h"
#include "ptx/movmatrix.cuh"
#include "tile/band.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Holds the factors by which the soft cap multiplies gradients of logits, 1 - (logit / cap)^2, for
// pairs of elements in float16: as exact as the rounding of the gradients.
template <int kN>
struct CapSlopes {
  __half2 pairs[kN][2];

  __device__ __forceinline__ void set(const float (&logits)[kN][4], float cap) {
    const float inverse = 1.0f / cap;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float first = logits[n][2 * half] * inverse;
        const float second = logits[n][2 * half + 1] * inverse;
        pairs[n][half] = __floats2half2_rn(1.0f - first * first, 1.0f - second * second);
      }
    }
  }
  // Elements that are not allowed keep a gradient of 0: their slope may be NaN.
  __device__ __forceinline__ void multiply(const float (&p)[kN][4],
                                           float (&gradients)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 slopes = __half22float2(pairs[n][half]);
        float& first = gradients[n][2 * half];
        float& second = gradients[n][2 * half + 1];
        first = p[n][2 * half] == 0.0f ? 0.0f : first * slopes.x;
        second = p[n][2 * half + 1] == 0.0f ? 0.0f : second * slopes.y;
      }
    }
  }
};

// Adds a bias of 16-bit elements whose keys are contiguous. It is read by rows of queries, two keys
// at a time, and transposed: reading element by element would take twice as many loads.
template <typename Bias, int kN>
__device__ __forceinline__ void add_rows(float (&scores)[kN][4], const Bias* bias,
                                         int64_t row_stride, int32_t key0, int32_t row0) {
  const Bias* from = bias + (row0 + fragment_row(0, 0)) * row_stride + key0 + fragment_col(0, 0);
  uint32_t pairs[kN][2];
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pairs[n][half] = *reinterpret_cast<const uint32_t*>(from + n * 8 * row_stride + half * 8);
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = ptx::movmatrix_trans(pairs[n][half]);
      Bias values[2];
      memcpy(values, &both, 4);
      scores[n][2 * half] += to_float(values[0]);
      scores[n][2 * half + 1] += to_float(values[1]);
    }
  }
}

// Turns products into logits, -inf where not allowed, except for the band; units:
// in_natural_units(). The fragments' rows are keys from key0 on, their columns queries from row0
// on. `allowed`: the mask in the format of TransposedMask. `slopes`: set here if there is a soft
// cap. With kManyRegisters more elements of a bias are loaded at the same time.
template <bool kManyRegisters, int kN>
__device__ __forceinline__ void modify_transposed(float (&scores)[kN][4],
                                                  const LogitModifiers& modifiers, const Band& band,
                                                  int32_t key0, int32_t row0,
                                                  const uint32_t* allowed = nullptr,
                                                  CapSlopes<kN>* slopes = nullptr) {
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
      using Bias = std::remove_cvref_t<decltype(*bias)>;
      bias += modifiers.bias0;
      if constexpr (kManyRegisters && sizeof(Bias) == 2) {
        const bool in_pairs = params.bias.col == 1 && params.bias.row % 2 == 0 &&
                              reinterpret_cast<uintptr_t>(bias) % 4 == 0 &&
                              extent.contains(key0 + 16, row0 + 8 * kN);
        if (__all_sync(0xffffffff, in_pairs))
          return add_rows(scores, bias, params.bias.row, key0, row0);
      }
      for_pairs<Bias, kManyRegisters ? 8 : 4, kN>(bias, params.bias.col, params.bias.row, key0,
                                                  row0, extent,
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
      if (params.bias) keep_finite(reinterpret_cast<float (&)[1][kN][4]>(scores), params);
      soft_cap<true>(reinterpret_cast<float (&)[1][kN][4]>(scores), options.logits_soft_cap);
      if (slopes != nullptr) slopes->set(scores, options.logits_soft_cap);
    }
    if (!in_natural_units(params)) multiply(kLog2E);
  }
  if (allowed != nullptr) {
    if (!__all_sync(0xffffffff, *allowed == ~0u)) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int bit = 8 * (e / 2 + n / 4 * 2) + n % 4 * 2 + e % 2;
          if (!(*allowed >> bit & 1)) scores[n][e] = minus_infinity();
        }
      }
    }
  } else if (modifiers.mask) {
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
