// Does the work of the begin and end kernels (edges.cuh) for heads that begin late or complete
// early: zeroes sums for dQ, and converts dQ to the operands' type. The warp of the main kernel
// that chooses key blocks does it, while memory bandwidth is free.
#pragma once

#include <cstdint>

#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/fragments.cuh"
#include "tile/quad.cuh"

namespace jax_flash::sm90 {

// Writes share `share` of a unit's zeros. Called by one warp. See ZeroPlan.
__device__ __forceinline__ void write_zeros(const BackwardCounters& counters, const ZeroPlan& zeros,
                                            float* sums, int32_t unit, int32_t share) {
  if (unit < zeros.first_unit) return;
  const int32_t first = share * zeros.share, end = min(first + zeros.share, zeros.unit_stores);
  float4* place = reinterpret_cast<float4*>(sums) +
                  (int64_t{unit} * zeros.unit_stores + first) * 32 + threadIdx.x % 32;
#pragma unroll 8
  for (int32_t i = first; i < end; ++i, place += 32) {
    *place = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::red_release_add(counters.zeroed(unit), 1);
}

// Converts every gridDim.x-th tile of 64 query rows, once all key blocks have added to the tile's
// head. The whole warp calls every function. The warp has few registers, so loops that would spill
// are not unrolled.
template <typename Config, typename Element, bool kOrdered>
struct EndWarp {
  static constexpr int kStrips = 4;               // of 16 rows, short: the next block may be wanted
  static constexpr uint32_t kNanoseconds = 4000;  // to sleep if no tile is ready

  const EndPlan& plan;
  const BackwardWorkspace& workspace;
  int32_t at = static_cast<int32_t>(blockIdx.x) * kStrips;

  __device__ __forceinline__ BackwardCounters counters() const {
    return {workspace.counters, plan.units};
  }
  __device__ __forceinline__ bool ready() const {
    if (at >= plan.tiles * kStrips) return false;
    if (at % kStrips != 0) return true;
    int32_t additions = 0;
    if (threadIdx.x % 32 == 0) {
      const int32_t unit = plan.tiles_of_unit.quotient(at / kStrips);
      additions = ptx::ld_relaxed(counters().added(unit));
    }
    if (__shfl_sync(0xffffffff, additions, 0) != plan.additions) return false;
    ptx::fence_acquire();
    return true;
  }
  __device__ __forceinline__ void convert_strip() {
    const int lane = kept_thread_index() % 32, strip = at % kStrips;
    const int32_t tile = at / kStrips, batch_head = plan.tiles_of_head.quotient(tile);
    const int32_t tile_row0 = (tile - batch_head * plan.tiles_of_head.divisor) * 64;
    const int32_t row = tile_row0 + strip * 16 + lane / 4;
    const int32_t lanes = dquery_lanes(plan.q_len, tile_row0);
    const float* from = workspace.dquery +
                        (int64_t{batch_head} * workspace.dquery_rows + tile_row0) * plan.head_dim +
                        (strip * 32 + lane) * 4;
    Element* to = plan.dquery.at<Element>(plan.heads.at(batch_head), row) + lane % 4 * 8;
    const auto store = [&](bool has_cols, const uint4& chunk, const uint4& chunk_below) {
      if (has_cols && row < plan.q_len) *reinterpret_cast<uint4*>(to) = chunk;
      if (has_cols && row + 8 < plan.q_len) {
        *reinterpret_cast<uint4*>(to + 8 * plan.dquery.row) = chunk_below;
      }
      to += 32;
    };
    // In ordered runs, the first block to add stores instead, so a sum is undefined if no block has
    // added to it. A tile has two flags.
    const auto is_stored = [&] {
      return workspace.turns[int64_t{batch_head} * workspace.flags + tile_row0 / kEdgeRows] != 0;
    };
    const bool has_sums = strip * 32 + lane < lanes && (!kOrdered || is_stored());
#pragma unroll 1
    for (int32_t cols = plan.head_dim; cols > 0; cols -= 32) {
      float4 values[4] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n, from += lanes * 4) {
        if (has_sums && n * 8 < cols) values[n] = *reinterpret_cast<const float4*>(from);
      }
      uint32_t words[4], words_below[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        words[n] = ptx::cvt_rn_x2<Element>(values[n].x * plan.scale, values[n].y * plan.scale);
        words_below[n] =
            ptx::cvt_rn_x2<Element>(values[n].z * plan.scale, values[n].w * plan.scale);
      }
      const uint4 chunk = exchange_quad(words), chunk_below = exchange_quad(words_below);
      store(lane % 4 * 8 < cols, chunk, chunk_below);
    }
    if (++at % kStrips == 0) at += (plan.blocks - 1) * kStrips;
  }
  // Converts tiles until the barrier's phase of this parity has ended.
  __device__ __forceinline__ void work_until(uint32_t barrier_smem, uint32_t parity) {
    bool works = true;
    while (__any_sync(0xffffffff,
                      !ptx::mbarrier_try_wait(barrier_smem, parity, works ? 0 : kNanoseconds))) {
      works = ready();
      if (works) convert_strip();
    }
  }
  __device__ __forceinline__ void finish() {
    const auto block = static_cast<int32_t>(blockIdx.x);
    if (threadIdx.x % 32 == 0) {
      *counters().converted(block) = (at / kStrips - block) / plan.blocks;
    }
  }
};

}  // namespace jax_flash::sm90
