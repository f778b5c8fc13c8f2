// Divides key blocks among thread blocks: restricts each to its tiles, and passes on the sums that
// another one adds. A thread block waits only for work that was taken before its own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ptx/global.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/plan.cuh"

namespace jax_flash::sm90 {

// Says what becomes of a thread block's dK and dV.
struct SplitSum {
  int32_t index = 0;    // they are stored under this index if addends < 0
  int32_t addends = 0;  // else they are written, with the sums of so many indices before added
};

// Restricts a key block to the tiles that belong to an index; `left` as in SplitPlan::block_of().
template <typename Block>
__device__ __forceinline__ void divide(const SplitPlan& plan, int32_t index, int32_t& left,
                                       Block& block) {
  if (index >= plan.first) {
    const int32_t chunk = index - plan.first;
    const int32_t begin = chunk * plan.chunk_tiles.divisor;
    const int32_t block_begin = plan.block_tiles.quotient(left - 1) * block.tile_count;
    const int32_t end = left;
    left = begin < block_begin ? block_begin : 0;
    const bool ends = end == block_begin + block.tile_count;
    block.sum = {chunk, ends ? chunk - plan.chunk_tiles.quotient(block_begin) : -1};
    block.restrict_to(max(begin, block_begin) - block_begin, end - block_begin);
  } else if (plan.parts.divisor > 1) {
    const int32_t number = index - plan.parts.quotient(index) * plan.parts.divisor;
    const int32_t parts = min(plan.parts.divisor, max(block.tile_count, 1));
    if (number >= parts) {  // nothing to do: no such keys exist, so no gradients are written
      block.kv_tile = INT32_MAX / 256;
      block.tile_count = 0;
      return;
    }
    block.sum = {index, number + 1 == parts ? number : -1};
    block.restrict_to(block.tile_count * number / parts, block.tile_count * (number + 1) / parts);
  }
}

// Stores and adds sums of a consumer, in fragment order. Called by its threads.
struct SplitSums {
  float* sums;      // [index][consumer][2][element]
  int32_t* stored;  // [index][consumer]: true if the sums are there
  int group, barrier;

  template <int kN>
  __device__ __forceinline__ float4* place(int32_t index) const {
    return reinterpret_cast<float4*>(sums) + (index * 2 + group) * (2 * kN * 128) +
           threadIdx.x % 128;
  }
  template <int kN>
  __device__ __forceinline__ void store(int32_t index, const float (&a)[kN][4],
                                        const float (&b)[kN][4]) const {
    float4* const to = place<kN>(index);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      to[n * 128] = make_float4(a[n][0], a[n][1], a[n][2], a[n][3]);
      to[(kN + n) * 128] = make_float4(b[n][0], b[n][1], b[n][2], b[n][3]);
    }
    ptx::barrier_sync(barrier, 128);
    if (threadIdx.x % 128 == 0) ptx::st_release(stored + index * 2 + group, 1);
  }
  template <int kN>
  __device__ __forceinline__ void add(int32_t index, float (&a)[kN][4], float (&b)[kN][4]) const {
    if (threadIdx.x % 128 == 0) {
      while (ptx::ld_acquire(stored + index * 2 + group) == 0) continue;
    }
    ptx::barrier_sync(barrier, 128);
    const float4* const from = place<kN>(index);
    const auto add_to = [&](float (&sum)[4], const float4& value) {
      sum[0] += value.x;
      sum[1] += value.y;
      sum[2] += value.z;
      sum[3] += value.w;
    };
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      add_to(a[n], __ldcg(from + n * 128));
      add_to(b[n], __ldcg(from + (kN + n) * 128));
    }
  }
};

}  // namespace jax_flash::sm90
