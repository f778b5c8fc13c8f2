// Combines the parts of divided units, which workers of the sm_90 decoding kernel have computed.
// Part i of a row has a maximum m_i in log2 units, a sum of exponentials l_i, and an output O_i
// that is not normalized:
//
//   m = max(m_i, sink)
//   l = sum of 2^(m_i - m) l_i + 2^(sink - m)
//   out = (sum of 2^(m_i - m) O_i) / l, lse = (m + log2 l) / log2(e)
#pragma once

#include <algorithm>
#include <cstdint>

#include "modifiers/sinks.cuh"
#include "params.h"
#include "plan/decode.h"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "sm90/decode/walk.cuh"
#include "status.h"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kCombineRowBlocks = 8;  // most blocks for the rows of a unit
// The rows of a unit get more blocks as long as there are no more than these in all.
inline constexpr int kCombineBlocks = 1024;
// The shared memory that each block requests if there are few blocks, so that each gets a
// multiprocessor of its own.
inline constexpr int kCombineSmemApart = 72 * 1024;

// Identifies the parts of a divided unit; unit < 0 if there is none. Each worker has two places for
// parts: the unit's first worker stores its part in its second place, the later workers store
// theirs in their first place.
struct DividedUnit {
  int32_t unit, parts, worker;

  // If units are alike, the unit is known before the decoding kernel ends.
  template <int kBlockKv>
  static __device__ __forceinline__ DividedUnit computed(const Forward& params,
                                                         const DecodeCall& call, int32_t block) {
    if (call.plan.parts) {
      const int32_t parts = call.shares_of_unit<kBlockKv>(params).workers;
      return {parts > 1 ? block : -1, parts, block * call.parts.divisor};
    }
    const DecodeShares& shares = call.shares;
    const int32_t cost = call.cost.divisor;
    if (block >= shares.workers) return {-1, 0, 0};
    const int32_t end = shares.start(block + 1), unit = call.cost.quotient(end - 1);
    const int32_t unit_end = (unit + 1) * cost;
    if (unit_end == end || unit * cost < shares.start(block)) return {-1, 0, 0};
    int32_t parts = 2;
    while (shares.start(block + parts) < unit_end) ++parts;
    return {unit, parts, block};
  }

  static __device__ __forceinline__ DividedUnit found(const DecodeCall& call, int32_t block) {
    const int32_t unit = call.workspace.ends[block].tail;
    if (unit < 0) return {-1, 0, 0};
    int32_t parts = 1;
    for (int32_t more = 32; more == 32; parts += more) {
      const int32_t other = block + parts + static_cast<int>(threadIdx.x % 32);
      const bool has_part = other < call.plan.workers && call.workspace.ends[other].head == unit;
      const uint32_t without = __ballot_sync(0xffffffff, !has_part);
      more = without ? __ffs(without) - 1 : 32;
    }
    return {unit, parts, block};
  }
};

// Reads and adds up the parts of a row of a unit, a round of parts at a time. In a round, each warp
// reads the values of kAhead parts, and its lanes read the statistics of all parts of the round.
// Arrays in registers are arguments, since the compiler would keep a struct that held them in
// memory.
template <int kHeadDim, int kWarps>
struct RowParts {
  static constexpr int kColSteps = (kHeadDim + 127) / 128;        // 32 lanes with four columns each
  static constexpr int kAhead = kWarps > 2 ? 8 / kColSteps : 16;  // parts of a warp in a round
  static constexpr int kGroup = 4;                                // parts that are skipped together
  static constexpr int kRound = kWarps * kAhead, kLaneParts = kRound / 32;
  static constexpr int kPitch = decode_pitch(kHeadDim);
  using Statistics = float2[kLaneParts];  // maximum and sum of exponentials, of this lane's parts
  using Values = float4[kAhead][kColSteps];
  using Sum = float4[kColSteps];

  const DecodeCall& call;
  const DividedUnit& divided;
  const int32_t& parts;  // 0 before the decoding kernel has ended
  const int lane, warp;
  // Point to the parts of the first round: this lane's statistics, this warp's values.
  const float2* statistics;
  const float* values;

  __device__ __forceinline__ void ask_statistics(Statistics& its, int32_t round) const {
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      const int32_t part = round + lane + i * 32;
      its[i] = part < parts ? __ldcg(statistics + round * 2 + i * 64 + (part == 0)) : float2{};
    }
  }
  __device__ __forceinline__ void ask_values(Values& value, int32_t round) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i % kGroup == 0 && round + i * kWarps >= divided.parts) break;
      const int32_t part = round + warp + i * kWarps;
      const float* part_values = values + (round + i * kWarps) * 2 * kPitch;
      if (i == 0 && part == 0) part_values += kPitch;
#pragma unroll
      for (int step = 0; step < kColSteps; ++step) {
        value[i][step] = part < parts && step * 128 + lane * 4 < call.value_dim
                             ? __ldcg(reinterpret_cast<const float4*>(part_values + step * 128))
                             : float4{};
      }
    }
  }

  // Returns the maximum of `top` and of all parts' maxima. `its`: the statistics of the first
  // round, also on return.
  __device__ __forceinline__ float find_top(Statistics& its, float top) const {
    const auto include = [&] {
#pragma unroll
      for (int i = 0; i < kLaneParts; ++i) {
        if (its[i].y != 0.0f) top = fmaxf(top, its[i].x);  // 0: nothing attended to
      }
    };
    include();
    if (parts > kRound) {
#pragma unroll 1
      for (int32_t round = kRound; round < parts; round += kRound) {
        ask_statistics(its, round);
        include();
      }
      ask_statistics(its, 0);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, distance));
    }
    return top;
  }

  // Adds this warp's parts of a round, and this lane's sums of exponentials, rescaled to `top`.
  __device__ __forceinline__ void add_round(Sum& sum, float& total, const Statistics& its,
                                            const Values& value, int32_t round, float top) const {
    float factors[kLaneParts];
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      factors[i] = its[i].y == 0.0f ? 0.0f : ptx::ex2_approx_ftz(its[i].x - top);
      total += its[i].y * factors[i];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i % kGroup == 0 && round + i * kWarps >= divided.parts) break;
      const float factor =
          __shfl_sync(0xffffffff, factors[i * kWarps / 32], warp + i * kWarps % 32);
      if (factor == 0.0f) continue;
#pragma unroll
      for (int step = 0; step < kColSteps; ++step) {
        sum[step].x += factor * value[i][step].x;
        sum[step].y += factor * value[i][step].y;
        sum[step].z += factor * value[i][step].z;
        sum[step].w += factor * value[i][step].w;
      }
    }
  }

  // Adds all rounds. The first has been read.
  __device__ __forceinline__ void add_rounds(Sum& sum, float& total, Statistics& its, Values& value,
                                             float top) const {
#pragma unroll 1
    for (int32_t round = 0;;) {
      add_round(sum, total, its, value, round, top);
      round += kRound;
      if (round >= parts) break;
      ask_statistics(its, round);
      ask_values(value, round);
    }
  }

  // Stores this warp's sum of values, and adds up its lanes' sums of exponentials.
  __device__ __forceinline__ void share_sums(float (&warp_sums)[kColSteps * 128], const Sum& sum,
                                             float& total) const {
#pragma unroll
    for (int step = 0; step < kColSteps; ++step) {
      *reinterpret_cast<float4*>(&warp_sums[step * 128 + lane * 4]) = sum[step];
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffff, total, distance);
    }
  }
};

// Adds the warps' sums of each of a thread's columns, and normalizes them.
template <int kWarps, int kCols, int kWidth>
__device__ __forceinline__ void add_warps(float (&result)[kCols],
                                          const float (&sums)[kWarps][kWidth], bool empty,
                                          float normalizer) {
#pragma unroll
  for (int i = 0; i < kCols; ++i) {
    const int col = static_cast<int>(threadIdx.x) + i * kWarps * 32;
    float all = 0.0f;
    if (col < kWidth) {
#pragma unroll
      for (int other = 0; other < kWarps; ++other) all += sums[other][col];
    }
    result[i] = empty ? 0.0f : all * normalizer;
  }
}

// Combines the parts of divided units. The grid is [units, row_blocks] if the plan has parts, else
// [workers, row_blocks]. A block handles some rows of one unit: in the first case, its own; in the
// second, the unit that its worker begins and another worker ends, if there is one. The block's
// warps divide the parts of the unit.
//
// All latency after the wait for the decoding kernel adds to the call. So all loads are issued at
// once, and their addresses are computed before the wait. Also before the wait, the same
// instructions run once with no parts, and the result is discarded. Otherwise instructions would be
// fetched from memory after the wait, a line at a time, since keys and values have evicted them
// from L2. If units differ, none of this is done: the block's unit is known after the wait only.
template <int kHeadDim, int kBlockKv, int kWarps, typename Element>
__global__ void __launch_bounds__(kWarps * 32)
    decode_combine_kernel(const __grid_constant__ DecodeCall call, const int32_t row_blocks,
                          const __grid_constant__ Forward params) {
  using Parts = RowParts<kHeadDim, kWarps>;
  constexpr int kWidth = Parts::kColSteps * 128;
  constexpr int kCols = (kWidth + kWarps * 32 - 1) / (kWarps * 32);  // of a thread at the end
  __shared__ __align__(16) float sums[kWarps][kWidth];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto block = static_cast<int32_t>(blockIdx.x) / row_blocks;
  const auto row_block = static_cast<int32_t>(blockIdx.x) % row_blocks;
  const bool ragged = call.plan.ragged;
  if (ragged) ptx::griddepcontrol_wait();
  const DividedUnit divided = ragged ? DividedUnit::found(call, block)
                                     : DividedUnit::computed<kBlockKv>(params, call, block);
  if (divided.unit < 0) return;
  int32_t parts = ragged ? divided.parts : 0;
  const DecodeUnit unit(call, divided.unit);
  const int32_t q_len = call.band.find(params, unit.batch).q_len - unit.query;
  bool waits = !ragged;  // true if the thread still has to wait
#pragma unroll 1
  for (int32_t row = row_block; row < call.rows; row += row_blocks) {
    const int32_t head = call.queries.quotient(row);
    const int32_t position = row - head * call.queries.divisor;
    if (unit.query + position >= call.q_len) continue;
    const bool exists = position < q_len;
    const float sink_log2 = read_sink(call.sinks.data != nullptr,
                                      unit.at<const float>(call.sinks) + head * call.sinks.head);
    Element* out =
        unit.at<Element>(call.out) + head * call.out.head + position * call.out.row + threadIdx.x;
    float* lse = unit.at<float>(call.lse) + head * call.lse.head + position * call.lse.row;
    const int64_t place = int64_t{row} * call.workspace.places + divided.worker * 2;
    const float2* statistics =
        reinterpret_cast<const float2*>(call.workspace.statistics) + place + lane * 2;
    const float* values = call.workspace.out + (place + warp * 2) * Parts::kPitch + lane * 4;
    asm volatile("" : "+l"(out), "+l"(lse), "+l"(statistics), "+l"(values));  // not recomputed

    if (waits) {  // so that addresses are translated early
      if (lane < divided.parts) ptx::prefetch_l2(statistics);
      if (warp < divided.parts) ptx::prefetch_l2(values);
    }

    const Parts row_parts{call, divided, parts, lane, warp, statistics, values};
    typename Parts::Statistics its;
    typename Parts::Values value;
    float result[kCols], its_lse;
#pragma unroll 1
    while (true) {
      row_parts.ask_statistics(its, 0);
      row_parts.ask_values(value, 0);
      const float top = row_parts.find_top(its, sink_log2);
      // Declared here, since in a function the compiler numbers their registers differently.
      float total = 0.0f;
      typename Parts::Sum sum = {};
      row_parts.add_rounds(sum, total, its, value, top);
      row_parts.share_sums(sums[warp], sum, total);
      __syncthreads();
      const bool empty = total == 0.0f || !exists;
      const float with_sink = total + ptx::ex2_approx_ftz(sink_log2 - top);
      add_warps(result, sums, empty, 1.0f / with_sink);
      its_lse = (top + log2f(with_sink)) * kLn2;
      if (empty) its_lse = exists ? sink_log2 * kLn2 : minus_infinity();
      if (!waits) break;
      asm volatile("" ::"f"(result[0]), "f"(its_lse));  // keeps the discarded round
      waits = false;
      __syncthreads();
      ptx::griddepcontrol_wait();
      parts = divided.parts;
    }
#pragma unroll
    for (int i = 0; i < kCols; ++i) {
      const int col = static_cast<int>(threadIdx.x) + i * kWarps * 32;
      if (col < call.value_dim) out[i * kWarps * 32] = Element(result[i]);
    }
    if (threadIdx.x == 0) *lse = its_lse;
    __syncthreads();
  }
}

template <int kHeadDim, int kBlockKv, typename Element>
Status launch_combine(const DecodeCall& call, const Forward& params, cudaStream_t stream) {
  const int32_t of_rows = call.plan.parts ? call.plan.units : call.plan.workers;
  const int32_t row_blocks =
      std::min(call.rows, std::max(kCombineRowBlocks, kCombineBlocks / of_rows));
  const int64_t blocks = int64_t{of_rows} * row_blocks;
  const auto launch = [&](auto kernel, int warps) {
    return launch_dependent("sm90::decode_combine_kernel", params.shape, kernel, blocks, warps * 32,
                            blocks <= kDecodeMultiprocessors ? kCombineSmemApart : 0, stream, call,
                            row_blocks, params);
  };
  // Chooses the warps of a block by the average number of parts of a unit.
  if (call.plan.workers / call.plan.units < 4) {
    return launch(decode_combine_kernel<kHeadDim, kBlockKv, 2, Element>, 2);
  }
  return launch(decode_combine_kernel<kHeadDim, kBlockKv, 8, Element>, 8);
}

}  // namespace jax_flash::sm90
