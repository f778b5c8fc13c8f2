// Adds up what the workers of the sm_90 decoding kernel computed of units that they divided.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/decode_plan.h"
#include "sm90/decode_walk.cuh"
#include "status.h"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineRowBlocks = 8;  // blocks for the rows of a unit, at most
inline constexpr int kCombineAhead = 4;  // parts that a warp reads before it knows their weights

// A unit that a worker begins and another one ends, or unit < 0: then there is none.
struct DividedUnit {
  int32_t unit, parts;

  // Of batches that are alike it is known before the decoding kernel ends.
  static __device__ __forceinline__ DividedUnit computed(const DecodeCall& call, int32_t worker) {
    const DecodeShares& shares = call.shares;
    const int32_t cost = call.cost.divisor;
    if (worker >= shares.workers) return {-1, 0};
    const int32_t end = shares.start(worker + 1), unit = call.cost.quotient(end - 1);
    const int32_t unit_end = (unit + 1) * cost;
    if (unit_end == end || unit * cost < shares.start(worker)) return {-1, 0};
    int32_t parts = 2;
    while (shares.start(worker + parts) < unit_end) ++parts;
    return {unit, parts};
  }

  static __device__ __forceinline__ DividedUnit found(const DecodeCall& call, int32_t block) {
    const int32_t unit = call.workspace.ends[block].tail;
    if (unit < 0) return {-1, 0};
    int32_t parts = 1;
    for (int32_t more = 32; more == 32; parts += more) {
      const int32_t other = block + parts + static_cast<int>(threadIdx.x % 32);
      const bool has_part = other < call.plan.workers && call.workspace.ends[other].head == unit;
      const uint32_t without = __ballot_sync(0xffffffff, !has_part);
      more = without ? __ffs(without) - 1 : 32;
    }
    return {unit, parts};
  }
};

// Grid: [workers, row_blocks]. A block looks after some rows of the unit that the worker
// begins and another one ends, if there is one. Its warps divide the parts of the unit: those of
// this worker and of the next ones.
template <int kHeadDim, typename Element>
__global__ void __launch_bounds__(kCombineWarps * 32)
    decode_combine_kernel(const __grid_constant__ DecodeCall call, const int32_t row_blocks,
                          const __grid_constant__ Forward params) {
  constexpr int kColSteps = (kHeadDim + 127) / 128;  // of 32 lanes of four columns
  __shared__ float4 sums[kCombineWarps][kColSteps * 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const auto block = static_cast<int32_t>(blockIdx.x) / row_blocks;
  const auto row_block = static_cast<int32_t>(blockIdx.x) % row_blocks;
  DividedUnit divided = {-1, 0};
  if (!call.plan.ragged) {
    divided = DividedUnit::computed(call, block);
    if (divided.unit < 0) return;
  }
  ptx::griddepcontrol_wait();
  if (call.plan.ragged) {
    divided = DividedUnit::found(call, block);
    if (divided.unit < 0) return;
  }
  const int32_t parts = divided.parts;
  const DecodeUnit unit(call, divided.unit);
  const int32_t q_len = call.band.of(params, unit.batch).q_len;
  for (int32_t row = row_block; row < call.rows; row += row_blocks) {
    const auto row_of = [&](int32_t part) {  // in the workspace
      return ((int64_t{block} + part) * 2 + (part == 0)) * call.rows + row;
    };
    const auto statistics_of = [&](int32_t part) {
      return part < parts ? reinterpret_cast<const float2*>(call.workspace.statistics)[row_of(part)]
                          : float2{};
    };
    const auto values_of = [&](int32_t part, int step) {
      const int32_t col = (step * 32 + lane) * 4;
      return part < parts && col < call.value_dim
                 ? *reinterpret_cast<const float4*>(call.workspace.out +
                                                    row_of(part) * call.value_dim + col)
                 : float4{};
    };
    const int32_t head = call.q_len.quotient(row);
    const int32_t position = row - head * call.q_len.divisor;
    // Everything is asked for at once.
    float2 weights[kCombineAhead];
    float4 values[kCombineAhead][kColSteps];
#pragma unroll
    for (int i = 0; i < kCombineAhead; ++i) {
      weights[i] = statistics_of(warp + i * warps);
#pragma unroll
      for (int step = 0; step < kColSteps; ++step) {
        values[i][step] = values_of(warp + i * warps, step);
      }
    }
    const float sink_log2 = call.sinks.data == nullptr
                                ? minus_infinity()
                                : unit.at<const float>(call.sinks)[head * call.sinks.head] * kLog2E;

    float top = sink_log2, total = 0.0f;  // of this lane's parts
    const auto take = [&](const float2& its) {
      if (its.y == 0.0f) return;  // nothing attended to
      const float higher = fmaxf(top, its.x);
      total = (total == 0.0f ? 0.0f : total * ptx::ex2_approx_ftz(top - higher)) +
              its.y * ptx::ex2_approx_ftz(its.x - higher);
      top = higher;
    };
    for (int32_t part = lane; part < parts; part += 64) {
      const float2 two[2] = {statistics_of(part), statistics_of(part + 32)};
      take(two[0]);
      take(two[1]);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(0xffffffff, total, distance);
      const float other_top = __shfl_xor_sync(0xffffffff, top, distance);
      const float higher = fmaxf(top, other_top);
      total = (total == 0.0f ? 0.0f : total * ptx::ex2_approx_ftz(top - higher)) +
              (other == 0.0f ? 0.0f : other * ptx::ex2_approx_ftz(other_top - higher));
      top = higher;
    }

    float4 sum[kColSteps] = {};
    const auto add = [&](const float2& weight, const float4(&part_values)[kColSteps]) {
      if (weight.y == 0.0f) return;
      const float factor = ptx::ex2_approx_ftz(weight.x - top);
#pragma unroll
      for (int step = 0; step < kColSteps; ++step) {
        sum[step].x += factor * part_values[step].x;
        sum[step].y += factor * part_values[step].y;
        sum[step].z += factor * part_values[step].z;
        sum[step].w += factor * part_values[step].w;
      }
    };
#pragma unroll
    for (int i = 0; i < kCombineAhead; ++i) add(weights[i], values[i]);
    for (int32_t part = warp + kCombineAhead * warps; part < parts; part += warps) {
      float4 more[kColSteps];
#pragma unroll
      for (int step = 0; step < kColSteps; ++step) more[step] = values_of(part, step);
      add(statistics_of(part), more);
    }
#pragma unroll
    for (int step = 0; step < kColSteps; ++step) sums[warp][step * 32 + lane] = sum[step];
    __syncthreads();
    const int32_t col = static_cast<int32_t>(threadIdx.x) * 4;
    if (col < call.value_dim) {
      float4 all = sums[0][threadIdx.x];
      for (int other = 1; other < warps; ++other) {
        const float4 its = sums[other][threadIdx.x];
        all = {all.x + its.x, all.y + its.y, all.z + its.z, all.w + its.w};
      }
      const bool exists = position < q_len, empty = total == 0.0f || !exists;
      const float with_sink = total + ptx::ex2_approx_ftz(sink_log2 - top);
      const float normalizer = 1.0f / with_sink;
      *reinterpret_cast<uint2*>(unit.at<Element>(call.out) + head * call.out.head +
                                position * call.out.row + col) =
          empty ? uint2{}
                : uint2{ptx::cvt_rn_x2<Element>(all.x * normalizer, all.y * normalizer),
                        ptx::cvt_rn_x2<Element>(all.z * normalizer, all.w * normalizer)};
      if (threadIdx.x == 0) {
        unit.at<float>(call.lse)[head * call.lse.head + position * call.lse.row] =
            !exists ? minus_infinity()
            : empty ? sink_log2 * kLn2
                    : (top + log2f(with_sink)) * kLn2;
      }
    }
    __syncthreads();
  }
}

template <int kHeadDim, typename Element>
Status launch_combine(const DecodeCall& call, const Forward& params, cudaStream_t stream) {
  const int32_t row_blocks = std::min(call.rows, kCombineRowBlocks);
  // About a warp for each part, as a unit has them on average.
  const int32_t parts = call.plan.workers / call.plan.units + 1;
  const int32_t warps = std::max(2, std::min(parts, kCombineWarps));
  return launch_dependent(
      "sm90::decode_combine_kernel", params.shape, decode_combine_kernel<kHeadDim, Element>,
      int64_t{call.plan.workers} * row_blocks, warps * 32, 0, stream, call, row_blocks, params);
}

}  // namespace jax_flash::sm90
