// Combines the parts of units that blocks of the sm_80 family's decoding kernel have computed for
// different keys (finish_row.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "modifiers/units.cuh"
#include "params.h"
#include "plan/decode_sm80.h"
#include "ptx/griddepcontrol.cuh"
#include "sm80/decode/call.cuh"
#include "sm80/decode/finish_row.cuh"
#include "sm80/kernels.h"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

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

// Implements the declaration in kernels.h.
template <typename Element>
Status launch_decode_combine(const DecodeCall& call, const Forward& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int32_t rows = std::min(kDecodeRows, DecodeUnits(shape).group * shape.q_len);
  const auto launch = [&](auto kernel) {
    return launch_dependent("sm80::decode_combine_kernel", shape, kernel,
                            int64_t{call.parts.units.divisor} * rows, kCombineWarps * 32, 0, stream,
                            call, params, rows);
  };
  // With more than 32 parts, 64 are read at once. A thread then needs more registers.
  return call.parts.parts.divisor > 32 ? launch(decode_combine_kernel<64, Element>)
                                       : launch(decode_combine_kernel<32, Element>);
}

}  // namespace jax_flash::sm80
