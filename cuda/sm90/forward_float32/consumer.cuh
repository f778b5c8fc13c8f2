// Implements a consumer warpgroup of Hopper's forward kernel for float32, which owns 64 rows of
// each query tile. It keeps Q in registers, and walks over key tiles from the last to the first. A
// step is:
//
//   start S of this tile; start P V of the last tile; await S; mask; exponentials; await P V; lower
//   O if a running maximum has risen; round P
//
// The two consumers do not wait for each other.
#pragma once

#include <cstdint>

#include "ptx/mbarrier.cuh"
#include "ptx/tf32.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/float32_products.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward_float32/config.cuh"
#include "sm90/forward_float32/plan.cuh"
#include "sm90/ring.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

template <typename Config>
struct Float32Consumer {
  static constexpr int kKeySteps = Config::kHeadDim / 8, kValueSteps = Config::kBlockKv / 8;
  static constexpr int kScoreN = Config::kBlockKv / 8, kOutN = Config::kHeadDim / 8;

  const Float32Plan& plan;
  const Float32Smem<Config>& smem;

  uint32_t query[kKeySteps][4];
  float scores[1][kScoreN][4];
  uint32_t weights[kValueSteps][4];  // P
  float out[1][kOutN][4];
  RingState<Config::kQueryStages> query_stage;
  RingState<Config::kStages> stage;  // of K and V
  // The next two are computed wherever they are used, since registers are scarce.
  static __device__ __forceinline__ int group() { return threadIdx.x / kWarpgroup - 1; }
  static __device__ __forceinline__ int warp_row() {  // in the query tile
    return threadIdx.x / 32 * 16 - 64;
  }

  __device__ __forceinline__ const Float32Work& work() const {
    return smem.works[query_stage.stage];
  }

  __device__ __forceinline__ void read_query() {
    const Float32Work& of = work();
    read_operands(query, of.query + warp_row() * plan.query.row, plan.query.row,
                  of.band.q_len - of.row0 - warp_row(), plan.head_dim, plan.vectors);
  }

  __device__ __forceinline__ uint32_t last_stage() const {
    return stage.stage == 0 ? Config::kStages - 1 : stage.stage - 1;
  }

  // Rounds P. The accumulator columns 2 t and 2 t + 1 serve as operand columns t and t + 4
  // (sm90/float32_tiles.cuh). The addition may lose a NaN, but then the row's sum is NaN.
  __device__ __forceinline__ void round_weights() {
    constexpr int kElement[4] = {0, 2, 1, 3};
#pragma unroll
    for (int k = 0; k < kValueSteps; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = __float_as_uint(scores[0][k][kElement[i]]) + ptx::kHalfTf32;
      }
    }
  }

  // Waits for the values of this tile. The parity depends on all exponentials: otherwise the
  // assembler would move these past the wait for the last P V. `flip` is 0, since sums are not
  // negative.
  __device__ __forceinline__ void await_value(const OnlineSoftmax<1>& softmax) const {
    const uint32_t flip =
        __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
    ptx::mbarrier_wait(smem.value_full(stage.stage), stage.parity ^ flip);
  }

  // Sets scores to -inf where an edge or a mask forbids the key.
  __device__ __forceinline__ void mask(int32_t tile, const Range& uncut) {
    const uint32_t keys = smem.keys[stage.stage].bits.words[threadIdx.x % 4];
    const bool edge = tile < uncut.first || tile >= uncut.end;
    if (!edge && __all_sync(0xffffffff, keys == kAllBits<kScoreN>)) return;
    AllowedBits allowed = {{keys, keys}};
    if (edge) {
      const Float32Work& of = work();
      forbid_edges(allowed, of.band, of.row0 + warp_row(), tile * Config::kBlockKv);
    }
    forbid<kScoreN>(scores[0], allowed, 0);
  }

  // Computes P of a tile, and returns whether it is the query tile's last. kFirst: it is the first;
  // otherwise P V of the tile before is started.
  template <bool kFirst>
  __device__ __forceinline__ bool step(OnlineSoftmax<1>& softmax, const Range& uncut) {
    ptx::mbarrier_wait(smem.key_full(stage.stage), stage.parity);
    start_product(scores[0], query, smem.key(stage.stage));
    if constexpr (!kFirst) start_addition(out[0], weights, smem.value(last_stage()));
    ptx::wgmma_wait_group<kFirst ? 0 : 1>();
    ptx::wgmma_results(scores[0]);
    // Reductions, whose results the compiler knows to be the same in all lanes.
    const int32_t tile = __reduce_max_sync(0xffffffff, smem.keys[stage.stage].tile);
    const bool last = __any_sync(0xffffffff, smem.keys[stage.stage].last);
    mask(tile, uncut);
    sync_and_arrive_warp(smem.key_empty(stage.stage));
    float factor[1][2];
    const bool rises = softmax.template raise_maximum<2>(scores, plan.to_log2, factor);
#pragma unroll
    for (auto& block : scores[0]) softmax.exponentials(block, 0, plan.to_log2);
    await_value(softmax);
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(out[0]);
      arrive_warp(smem.value_empty(last_stage()));
      if (rises) OnlineSoftmax<1>::rescale(out, factor);
    }
    round_weights();
    stage.advance();
    return last;
  }

  // Writes out = O / l and lse.
  __device__ __forceinline__ void store(const OnlineSoftmax<1>& softmax) {
    const Float32Work& of = work();
    const Float32Rows rows(of.out, plan.out.row, plan.value_dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = warp_row() + fragment_row(0, 2 * half);
      float lse, normalizer;
      softmax.finish(0, half, plan.to_log2, of.sink_log2, lse, normalizer);
      if (of.row0 + row >= of.band.q_len) {
        lse = minus_infinity();
        normalizer = 0.0f;
      }
#pragma unroll
      for (auto& block : out[0]) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          block[e] = normalizer == 0.0f ? 0.0f : block[e] * normalizer;
        }
      }
      if (of.row0 + row >= plan.q_len) continue;
      if (threadIdx.x % 4 == 0) of.lse[row * plan.lse.row] = lse;
      rows.store(row, half, out[0]);
    }
  }

  // Computes the query tile that work() describes.
  __device__ __forceinline__ void attend() {
    const Range uncut = uncut_tiles<Config::kBlockKv>(work().band, work().row0 + group() * 64);
    OnlineSoftmax<1> softmax;
    set_zero(out);
    if (__any_sync(0xffffffff, work().has_keys)) {
      read_query();
      bool last = step<true>(softmax, uncut);
      while (!last) last = step<false>(softmax, uncut);
      start_addition(out[0], weights, smem.value(last_stage()));
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(out[0]);
      arrive_warp(smem.value_empty(last_stage()));
    }
    store(softmax);
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      ptx::mbarrier_wait(smem.query_full(query_stage.stage), query_stage.parity);
      if (__reduce_max_sync(0xffffffff, work().row0) < 0) break;
      attend();
      sync_and_arrive_warp(smem.query_empty(query_stage.stage));
      query_stage.advance();
    }
  }
};

}  // namespace jax_flash::sm90
