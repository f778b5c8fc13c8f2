// Finishes rows that several warps, or several blocks, of the sm_80 family's decoding kernel have
// computed for different keys. Part i of a row has a running maximum m_i, a sum of exponentials
// l_i, and a sum O_i of P V:
//
//   m = max(m_i), l = sum of 2^(m_i - m) l_i, out = (sum of 2^(m_i - m) O_i) / l
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/sinks.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "ptx/math.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/element.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// Computes lse of a row, and the factor of its output; stores lse. `top` and `total`: its running
// maximum and its sum of exponentials.
template <typename Element>
__device__ __forceinline__ float finish_row(const Forward& params, const BatchIndex& batch,
                                            const Band& band, int32_t head, int32_t query,
                                            float top, float total, bool stores) {
  const bool natural = in_natural_units(params);
  const float sink =
      read_sink(bool{params.sinks}, batch.pointer<const float>(params.sinks, head), !natural);
  float lse, lse_low, normalizer;
  OnlineSoftmax<1, true>::finish_row<std::is_same_v<Element, Tf32x3>>(
      top, total, natural ? kLog2E : 1.0f, sink, lse, lse_low, normalizer);
  if (query >= band.q_len) {
    lse = minus_infinity();
    lse_low = normalizer = 0.0f;
  }
  if (stores) {
    batch.pointer<float>(params.lse, head)[query * params.lse.row] = lse;
    if (params.lse_low) {
      batch.pointer<float>(params.lse_low, head)[query * params.lse_low.row] = lse_low;
    }
  }
  return normalizer;
}

// Stores up to four columns of a row of out, whose type is Out.
template <typename Out>
__device__ __forceinline__ void store_columns_as(const Forward& params, const BatchIndex& batch,
                                                 int32_t head, int32_t query, int32_t col,
                                                 const float4& values, float normalizer) {
  const float results[4] = {values.x, values.y, values.z, values.w};
  if constexpr (kIsFloat32<Out>) {
    float* to = batch.pointer<float>(params.out, head) + query * params.out.row + col;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (col + e < params.shape.value_dim) {
        to[e] = normalizer == 0.0f ? 0.0f : results[e] * normalizer;
      }
    }
  } else {
    uint32_t words[2] = {};
    if (normalizer != 0.0f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] =
            ptx::cvt_rn_x2<Out>(results[2 * i] * normalizer, results[2 * i + 1] * normalizer);
      }
    }
    Out* to = batch.pointer<Out>(params.out, head) + query * params.out.row + col;
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
}
template <typename Element>
__device__ __forceinline__ void store_columns(const Forward& params, const BatchIndex& batch,
                                              int32_t head, int32_t query, int32_t col,
                                              const float4& values, float normalizer) {
  const auto store = [&](auto out) {
    store_columns_as<decltype(out)>(params, batch, head, query, col, values, normalizer);
  };
  if constexpr (kIsFloat8<Element>) {
    switch (params.out.dtype) {
      case DType::kFloat32: return store(float{});
      case DType::kFloat16: return store(__half{});
      default: return store(__nv_bfloat16{});
    }
  } else {
    store(Element{});
  }
}

// Holds the greatest running maximum among statistics that have a sum, and the sums relative to it.
struct CombinedRow {
  float top = minus_infinity(), total = 0.0f;

  __device__ __forceinline__ void include_top(const float2& statistics) {
    if (statistics.y != 0.0f) top = fmaxf(top, statistics.x);
  }
  __device__ __forceinline__ float factor(const float2& statistics, float to_log2) const {
    return statistics.y == 0.0f ? 0.0f : ptx::ex2_approx_ftz((statistics.x - top) * to_log2);
  }
};

}  // namespace jax_flash::sm80
