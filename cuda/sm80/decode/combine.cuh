// Combines rows that several warps, or several blocks, of the sm_80 family's decoding kernel have
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
#include "plan/decode_sm80.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "sm80/decode/call.cuh"
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

inline constexpr int kCombineWarps = 8;

// Reads and adds up the parts of a row, kRound parts at a time: each lane reads the statistics of
// kLaneParts, each warp the values of kAhead. Arrays in registers are arguments, since the compiler
// would keep a struct that held them in memory.
template <int kRound>
struct RowParts {
  static constexpr int kLaneParts = kRound / 32, kAhead = kRound / kCombineWarps;
  static constexpr int kSteps = kDecodeMaxHeadDim / 128;  // 32 lanes with four columns each
  using Statistics = float2[kLaneParts];
  using Values = float4[kAhead][kSteps];
  using Sum = float4[kSteps];

  const float2* statistics;  // of the row's first part
  const float* values;
  int32_t parts, pitch, value_dim;
  int lane, warp;

  __device__ __forceinline__ void ask_statistics(Statistics& its, int32_t round) const {
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      const int32_t part = round + lane + i * 32;
      its[i] = part < parts ? statistics[part * kDecodeRows] : float2{};
    }
  }
  __device__ __forceinline__ void ask_values(Values& value, int32_t round) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t part = round + warp + i * kCombineWarps;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int col = step * 128 + lane * 4;
        value[i][step] = part < parts && col < value_dim
                             ? *reinterpret_cast<const float4*>(
                                   values + int64_t{part} * kDecodeRows * pitch + col)
                             : float4{};
      }
    }
  }
  // Adds this warp's parts of a round, and this lane's sums of exponentials.
  __device__ __forceinline__ void add_round(Sum& sum, CombinedRow& combined, const Statistics& its,
                                            const Values& value, float to_log2) const {
    float factors[kLaneParts];
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      factors[i] = combined.factor(its[i], to_log2);
      combined.total += its[i].y * factors[i];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const float factor =
          __shfl_sync(0xffffffff, factors[i * kCombineWarps / 32], warp + i * kCombineWarps % 32);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        add_scaled(sum[step], factor, value[i][step]);
      }
    }
  }
  // Sets this warp's sum of values, and the row's maximum and sum of exponentials.
  __device__ __forceinline__ void add_up(Sum& sum, CombinedRow& combined, float to_log2) const {
    const auto include = [&](const Statistics& its) {
#pragma unroll
      for (int i = 0; i < kLaneParts; ++i) combined.include_top(its[i]);
    };
    Statistics its;
    Values value;
    ask_statistics(its, 0);
    ask_values(value, 0);  // together with the statistics, not after them
    include(its);
    for (int32_t round = kRound; round < parts; round += kRound) {
      Statistics others;
      ask_statistics(others, round);
      include(others);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      combined.top = fmaxf(combined.top, __shfl_xor_sync(0xffffffff, combined.top, distance));
    }
#pragma unroll 1
    for (int32_t round = 0;;) {
      add_round(sum, combined, its, value, to_log2);
      round += kRound;
      if (round >= parts) break;
      ask_statistics(its, round);
      ask_values(value, round);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      combined.total += __shfl_xor_sync(0xffffffff, combined.total, distance);
    }
  }
};

// Combines the parts of units. The grid is [units, rows], with `rows` rows of a unit. The warps of
// a block divide the parts of a row.
template <int kRound, typename Element>
__global__ void __launch_bounds__(kCombineWarps * 32)
    decode_combine_kernel(const __grid_constant__ DecodeCall call,
                          const __grid_constant__ Forward params, int32_t rows) {
  __shared__ __align__(16) float sums[kCombineWarps][kDecodeMaxHeadDim];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto unit_index = static_cast<int32_t>(blockIdx.x) / rows;
  const auto row = static_cast<int32_t>(blockIdx.x) % rows;
  const DecodeParts& parts = call.parts;
  const DecodeUnit unit(params.shape, parts, unit_index);
  if (row >= unit.rows) return;
  const BatchIndex batch(call.batch_axes, unit.batch);
  const Band band = call.band_of(params, unit.batch, batch);
  const float to_log2 = in_natural_units(params) ? kLog2E : 1.0f;
  const int64_t first = int64_t{unit_index} * parts.parts.divisor * kDecodeRows + row;
  const RowParts<kRound> row_parts{reinterpret_cast<const float2*>(parts.statistics) + first,
                                   parts.values + first * parts.pitch,
                                   parts.parts.divisor,
                                   parts.pitch,
                                   params.shape.value_dim,
                                   lane,
                                   warp};
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_wait();  // until the previous kernel has stored the parts
#endif

  CombinedRow combined;
  typename RowParts<kRound>::Sum sum = {};
  row_parts.add_up(sum, combined, to_log2);
#pragma unroll
  for (int step = 0; step < RowParts<kRound>::kSteps; ++step) {
    *reinterpret_cast<float4*>(&sums[warp][step * 128 + lane * 4]) = sum[step];
  }
  __syncthreads();
  const int32_t head = unit.head(row), query = unit.query(row), col = threadIdx.x * 4;
  if (col >= params.shape.value_dim) return;
  const float normalizer = finish_row<Element>(params, batch, band, head, query, combined.top,
                                               combined.total, threadIdx.x == 0);
  float4 total = {};
#pragma unroll
  for (int i = 0; i < kCombineWarps; ++i) {
    const auto& its = *reinterpret_cast<const float4*>(&sums[i][col]);
    total.x += its.x;
    total.y += its.y;
    total.z += its.z;
    total.w += its.w;
  }
  store_columns<Element>(params, batch, head, query, col, total, normalizer);
}

}  // namespace jax_flash::sm80
