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

// The rows of a unit get up to kCombineRowBlocks blocks, or more as long as these are up to
// kCombineBlocks in all.
inline constexpr int kCombineRowBlocks = 8, kCombineBlocks = 1024;
// The shared memory that each block requests if there are few blocks, so that each gets a
// multiprocessor of its own.
inline constexpr int kCombineSmemApart = 72 * 1024;

// Describes the parts of a divided unit, which follow from the call and its lengths. Each worker
// has two places for parts: the unit's first worker stores its part in its second place, the later
// workers store theirs in their first place.
struct UnitParts {
  int32_t unit, parts, worker;  // worker: the first one; parts == 1: nothing to combine

  // Finds what block `index` combines, if blocks are as many as combine_units() says: unit number
  // `index`, or the unit that worker number `index` begins and another one ends.
  template <int kBlockKv>
  static __device__ __forceinline__ UnitParts find(const DecodeCall& call, int32_t index) {
    if (call.plan.parts) {
      return {index, call.shares_of_unit<kBlockKv, false>().workers, index * call.parts.divisor};
    }
    return call.plan.units <= call.plan.workers ? of_unit<kBlockKv>(call, index)
                                                : of_worker<kBlockKv>(call, index);
  }

 private:
  template <int kBlockKv>
  static __device__ __forceinline__ UnitParts of_unit(const DecodeCall& call, int32_t unit) {
    const int32_t batch = call.batch_units.quotient(unit);
    const int32_t in_batch = unit - batch * call.batch_units.divisor;
    const int32_t in_turn = call.units_in_turn(), sequence = in_turn == 1 ? in_batch : 0;
    DecodeShares shares = call.shares;
    // The cost of one unit in this batch entry, and the sum of such costs over those before.
    int32_t before = batch * call.cost.divisor, cost = call.cost.divisor;
    if (call.plan.ragged) {
      const int lane = threadIdx.x % 32;
      int32_t sums[3] = {};  // for all batch entries, those before, and this one
#pragma unroll 4
      for (int32_t other = lane; other < call.batches(); other += 32) {
        const int32_t its = call.cost_of<kBlockKv, false>(other);
        sums[0] += its;
        if (other < batch) sums[1] += its;
        if (other == batch) sums[2] = its;
      }
#pragma unroll
      for (int32_t& sum : sums) sum = __reduce_add_sync(0xffffffff, sum);
      shares = DecodeShares(call.sequence_workers.divisor, kBlockKv, sums[0] * in_turn);
      before = sums[1];
      cost = sums[2];
    }
    const int32_t start = before * in_turn + (in_batch - sequence) * cost;
    const int32_t first = shares.worker_of(start);
    return {unit, shares.worker_of(start + cost - 1) - first + 1,
            sequence * call.sequence_workers.divisor + first};
  }
  template <int kBlockKv>
  static __device__ __forceinline__ UnitParts of_worker(const DecodeCall& call, int32_t worker) {
    const DecodeStart next = DecodeStart::of<kBlockKv>(call, worker, 1);
    const DecodeShares& shares = next.shares;
    const int32_t in_sequence = next.worker - 1;
    const int32_t start = shares.start(next.worker) - next.first;  // of the unit
    if (next.worker >= shares.workers || next.first == 0 || start < shares.start(in_sequence)) {
      return {0, 1, 0};
    }
    const int32_t cost = call.cost_of<kBlockKv, false>(call.batch_units.quotient(next.unit));
    return {next.unit, shares.worker_of(start + cost - 1) - in_sequence + 1, worker};
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
  const UnitParts& unit;
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
      if (i % kGroup == 0 && round + i * kWarps >= unit.parts) break;
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
      // Not 0 far below a sink: such a part may hold NaN, and its row is not one without keys.
      factors[i] =
          its[i].y == 0.0f ? -1.0f : ptx::max_nan(ptx::ex2_approx_ftz(its[i].x - top), 0x1p-126f);
      total += its[i].y * factors[i];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i % kGroup == 0 && round + i * kWarps >= unit.parts) break;
      const float factor =
          __shfl_sync(0xffffffff, factors[i * kWarps / 32], warp + i * kWarps % 32);
      if (factor < 0.0f) continue;  // nothing attended to: values are not initialized
#pragma unroll
      for (int step = 0; step < kColSteps; ++step) {
        add_scaled(sum[step], factor, value[i][step]);
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

// Combines the parts of divided units. The grid is [combine_units(), row_blocks]: a block handles
// some rows of a unit. Its warps divide the parts.
//
// All latency after the wait for the decoding kernel adds to the call. So all loads are issued at
// once, and their addresses are computed before the wait. Also before the wait, the same
// instructions run once with no parts, and the result is discarded. Otherwise instructions would be
// fetched from memory after the wait, a line at a time, since keys and values have evicted them
// from L2.
template <int kHeadDim, int kBlockKv, int kWarps, typename Element>
__global__ void __launch_bounds__(kWarps * 32, kWarps > 2 ? 3 : 1)
    decode_combine_kernel(const __grid_constant__ DecodeCall call, const int32_t row_blocks) {
  using Parts = RowParts<kHeadDim, kWarps>;
  constexpr int kWidth = Parts::kColSteps * 128;
  constexpr int kCols = (kWidth + kWarps * 32 - 1) / (kWarps * 32);  // of a thread at the end
  __shared__ __align__(16) float sums[kWarps][kWidth];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto index = static_cast<int32_t>(blockIdx.x) / row_blocks;
  const auto row_block = static_cast<int32_t>(blockIdx.x) % row_blocks;
  const UnitParts unit_parts = UnitParts::find<kBlockKv>(call, index);
  if (unit_parts.parts == 1) {
    // The grid must not end before the decoding kernel does: the next kernel waits for this one
    // only.
    if (blockIdx.x == 0) ptx::griddepcontrol_wait();
    return;
  }
  int32_t parts = 0;
  const DecodeUnit unit(call, unit_parts.unit);
  const int32_t q_len = call.band_of<false>(unit.batch).q_len - unit.query;
  bool waits = true;  // the thread still has to wait
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
    const int64_t place = int64_t{row} * call.workspace.places + unit_parts.worker * 2;
    const float2* statistics =
        reinterpret_cast<const float2*>(call.workspace.statistics) + place + lane * 2;
    const float* values = call.workspace.out + (place + warp * 2) * Parts::kPitch + lane * 4;
    asm volatile("" : "+l"(out), "+l"(lse), "+l"(statistics), "+l"(values));  // not recomputed

    if (waits) {  // so that addresses are translated early
      if (lane < unit_parts.parts) ptx::prefetch_l2(statistics);
      if (warp < unit_parts.parts) ptx::prefetch_l2(values);
    }

    const Parts row_parts{call, unit_parts, parts, lane, warp, statistics, values};
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
      parts = unit_parts.parts;
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

// Returns the most units that workers may have divided.
inline int32_t combine_units(const DecodePlan& plan) { return std::min(plan.units, plan.workers); }

template <int kHeadDim, int kBlockKv, typename Element>
Status launch_combine(const DecodeCall& call, const Shape& shape, cudaStream_t stream) {
  const int32_t units = combine_units(call.plan);
  const int32_t row_blocks =
      std::min(call.rows, std::max(kCombineRowBlocks, kCombineBlocks / units));
  const int64_t blocks = int64_t{units} * row_blocks;
  const auto launch = [&](auto kernel, int warps) {
    return launch_dependent("sm90::decode_combine_kernel", shape, kernel, blocks, warps * 32,
                            blocks <= kDecodeMultiprocessors ? kCombineSmemApart : 0, stream, call,
                            row_blocks);
  };
  // Two warps read up to 32 parts at once, and a multiprocessor has more blocks of two warps. With
  // few blocks, more warps have less latency.
  const int32_t parts = call.plan.workers / call.plan.units;  // of a unit, on average
  if (parts < 4 || (parts <= 32 && blocks > 2 * kDecodeMultiprocessors)) {
    return launch(decode_combine_kernel<kHeadDim, kBlockKv, 2, Element>, 2);
  }
  return launch(decode_combine_kernel<kHeadDim, kBlockKv, 8, Element>, 8);
}

}  // namespace jax_flash::sm90
