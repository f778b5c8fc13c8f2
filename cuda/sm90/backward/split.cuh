// Divides key blocks among thread blocks: restricts each thread block to its query tiles, and adds
// up their dK and dV in device memory. A thread block waits only for work that was taken before its
// own, so it cannot deadlock.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/plan.cuh"

namespace jax_flash::sm90 {

// Describes the share that a thread block's dK and dV are of those of the key block. If weight
// equals total, they are complete.
struct SplitSum {
  int32_t index = 0;              // of the sums that the key block has
  int32_t weight = 0, total = 0;  // in tiles if there are chunks, else in thread blocks
};

// Restricts a key block to the tiles that belong to an index. `left`: see SplitPlan::block_of().
// kMaySplit: the plan may have parts or chunks.
template <bool kMaySplit, typename Block>
__device__ __forceinline__ void divide(const SplitPlan& plan, int32_t index, int32_t& left,
                                       Block& block) {
  const int32_t sharing = plan.sharing.divisor;
  SplitSum sum{0, 1, sharing};
  if (kMaySplit && plan.chunks > 0) {
    sum.total = block.tile_count * sharing;
    if (index >= plan.first) {
      const int32_t begin = (index - plan.first) * plan.chunk_tiles.divisor, end = left;
      sum.index = plan.block_tiles.quotient(left - 1);
      const int32_t block_begin = sum.index * block.tile_count;
      left = begin < block_begin ? block_begin : 0;
      block.restrict_to(max(begin, block_begin) - block_begin, end - block_begin);
    }
    sum.weight = block.tile_count;
  } else if (kMaySplit && plan.parts.divisor > 1) {
    sum.index = plan.parts.quotient(index);
    const int32_t number = index - sum.index * plan.parts.divisor;
    const int32_t parts = min(plan.parts.divisor, max(block.tile_count, 1));
    if (number >= parts) {  // nothing to do: no such keys exist, so no gradients are written
      block.kv_tile = INT32_MAX / 256;
      block.tile_count = 0;
      return;
    }
    sum.total = parts * sharing;
    block.restrict_to(block.tile_count * number / parts, block.tile_count * (number + 1) / parts);
  }
  if (sharing > 1) {
    sum.index =
        (block.batch_index * plan.kv_heads + block.kv_head) * plan.key_tiles + block.kv_tile;
  }
  block.sum = sum;
}

// Adds up dK and dV of a consumer, in fragment order. The first thread block to arrive stores its
// own, the next ones add theirs, and the last one adds the stored sum to its registers. Called by
// all threads of the consumer.
struct SplitSums {
  float* sums;        // [index][consumer][element of dK, then of dV]
  int32_t* counters;  // [index][consumer]: weights that have arrived, and that are added
  int group, barrier;
  uint32_t scratch_smem;  // four bytes, free until `barrier`

  // Returns whether a and b are now complete.
  template <int kNA, int kNB>
  __device__ __forceinline__ bool add_up(const SplitSum& sum, float (&a)[kNA][4],
                                         float (&b)[kNB][4]) const {
    const bool leader = threadIdx.x % 128 == 0;
    int32_t* const come = counters + (int64_t{sum.index} * kSplitConsumers + group) * 2;
    int32_t* const added = come + 1;
    if (leader) ptx::st_shared_b32(scratch_smem, atomicAdd(come, sum.weight));
    ptx::barrier_sync(barrier, 128);
    const int32_t before = ptx::ld_relaxed_shared_s32(scratch_smem);
    const bool first = before == 0, last = before + sum.weight == sum.total;
    if (leader && !first) {
      while (true) {
        const int32_t weight = ptx::ld_acquire(added);
        if (last ? weight == before : weight > 0) break;
      }
    }
    ptx::barrier_sync(barrier, 128);
    float4* const place = reinterpret_cast<float4*>(sums) +
                          (int64_t{sum.index} * kSplitConsumers + group) * ((kNA + kNB) * 128) +
                          threadIdx.x % 128;
    if (last) {
      gather(place, a);
      gather(place + kNA * 128, b);
      return true;
    }
    put(first, place, a);
    put(first, place + kNA * 128, b);
    ptx::barrier_sync(barrier, 128);
    if (leader) ptx::red_release_add(added, sum.weight);
    return false;
  }

 private:
  template <int kN>
  __device__ __forceinline__ void put(bool first, float4* place,
                                      const float (&values)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float (&value)[4] = values[n];
      if (first) {
        place[n * 128] = make_float4(value[0], value[1], value[2], value[3]);
      } else {
        ptx::red_add_v4_f32(reinterpret_cast<float*>(place + n * 128), value);
      }
    }
  }
  template <int kN>
  __device__ __forceinline__ void gather(const float4* place, float (&values)[kN][4]) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float4 value = __ldcg(place + n * 128);
      values[n][0] += value.x;
      values[n][1] += value.y;
      values[n][2] += value.z;
      values[n][3] += value.w;
    }
  }
};

}  // namespace jax_flash::sm90
