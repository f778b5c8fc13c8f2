// Implements a consumer warpgroup of the FP8 forward kernel, which owns 64 rows of each query tile.
//
// Its loop is a chain of steps over the key tiles of all query tiles, from the last key tile of
// each query tile to the first. A step is:
//
//   start S; start P V of the last tile; await S; mask; exponentials; await P V; round P; lower P
//   if a sum is too great
//
// The first step of a query tile starts the last P V of the query tile before, and stores the
// output of that query tile. The two consumers do not wait for each other: to alternate at the
// tensor cores, or at exponentials, makes most calls slower (TUNING_fp8.md).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "ptx/float8.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward_float8/config.cuh"
#include "sm90/forward_float8/plan.cuh"
#include "sm90/forward_float8/softmax.cuh"
#include "sm90/ring.cuh"
#include "tile/element.cuh"
#include "tile/quad.cuh"
#include "tile/wgmma_tile.cuh"
#include "wgmma.h"

namespace jax_flash::sm90 {

template <typename Config>
struct Float8Consumer {
  static constexpr int kOutN = Config::kValueDim / 8;
  // The running maximum of a row that has had no key: so low that any logit makes a sum too great.
  static constexpr float kNoMaximum = -1e30f;

  const Float8Plan& plan;
  const Float8Smem<Config>& smem;

  float scores[16][4];
  float out[kOutN][4];
  uint32_t weights[4][4];  // P
  // P is 2^(logit - running maximum), logits in log2 units, times the ratio of the tile's scale of
  // V to the head's greatest (KeyFactors). `sum` is without this ratio.
  float maximum[2], sum[2];
  RingState<Config::kQueryStages> query_stage;
  RingState<Config::kStages> stage;  // of K and V
  int32_t tile, first;               // key tile, and the one that is processed last
  Range uncut;                       // tiles that the band does not cut
  float query_to_log2;               // as in Float8Work
  bool accumulates = false;          // true if `out` already has a product of the query tile

  // The next two are computed wherever they are used, since registers are scarce.
  static __device__ __forceinline__ int group() { return threadIdx.x / kWarpgroup - 1; }
  static __device__ __forceinline__ int warp_row() {  // in the query tile
    return threadIdx.x / 32 * 16 - 64;
  }

  __device__ __forceinline__ Float8Work& work() const { return smem.works[query_stage.stage]; }

  __device__ __forceinline__ void start_scores() {
    const auto query = smem.query(query_stage.stage, group());
    const auto key = smem.key(stage.stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kKeySteps; ++k) {
      ptx::Wgmma<Float8, Config::kBlockKv>::ss(scores, descriptor_k_major(query, 0, k),
                                               descriptor_k_major(key, 0, k), k != 0);
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ void start_out() {
    const auto value = smem.value(last_stage());
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kValueSteps; ++k) {
      ptx::Wgmma<Float8, Config::kValueDim>::rs(out, weights[k], descriptor_k_major(value, 0, k),
                                                k != 0 || accumulates);
    }
    ptx::wgmma_commit_group();
    accumulates = true;
  }

  __device__ __forceinline__ uint32_t last_stage() const {
    return stage.stage == 0 ? Config::kStages - 1 : stage.stage - 1;
  }

  // Lists the reasons to compute a tile's logits from its products before the exponentials.
  struct Rules {
    bool edge = false, segments = false, all = false;  // all: for another reason
    __device__ __forceinline__ bool any() const { return edge || segments || all; }
  };
  template <bool kFresh>
  __device__ __forceinline__ Rules find_rules() const {
    Rules rules;
    rules.edge = tile < uncut.first || tile >= uncut.end;
    rules.all = kFresh;
    if constexpr (Config::kGeneral) {
      const Float8Work& of = work();
      rules.all = kFresh || plan.cap_log2 > 0.0f;
      if (plan.segments.query != nullptr) {
        const auto keys = tile_span<Config::kBlockKv>(of.key_spans, plan.segments.key_blocks, tile);
        rules.segments = __any_sync(0xffffffff, of.segments.least != of.segments.greatest ||
                                                    keys.least != keys.greatest ||
                                                    of.segments.least != keys.least);
      }
    }
    return rules;
  }

  // Turns products into logits in log2 units.
  __device__ __forceinline__ void make_logits(const Rules& rules, float factor) {
    const Float8Work& of = work();
    const int32_t col0 = tile * Config::kBlockKv;
    scale_products(scores, factor);
    if constexpr (Config::kGeneral) {
      if (plan.cap_log2 > 0.0f) cap_logits(scores, plan.cap_log2);
      if (rules.segments) {
        const int32_t row = of.row0 + warp_row() + fragment_row(0, 0);
        const int32_t row_ids[2] = {of.query_ids[row], of.query_ids[row + 8]};
        forbid_other_segments(scores, of.key_ids + col0, row_ids);
      }
    }
    if (!rules.edge) return;
    AllowedBits allowed = {{~0u, ~0u}};
    forbid_edges(allowed, of.band, of.row0 + warp_row(), col0);
    forbid<16>(scores, allowed, 0);
  }

  // Computes the scores again, by mma.sync: the warpgroup's other warps need not take part.
  __device__ __forceinline__ void compute_scores_again() {
    const BlockReader query(smem.query(query_stage.stage, group()), BlockOrder::kRowsFirst,
                            warp_row() % 64, 0);
    const BlockReader key(smem.key(stage.stage), BlockOrder::kColsFirst, 0, 0);
#pragma unroll
    for (auto& block : scores) {
#pragma unroll
      for (float& x : block) x = 0.0f;
    }
#pragma unroll 1
    for (int k = 0; k < Config::kKeySteps; ++k) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, query.at(0, 2 * k));
#pragma unroll
      for (int n = 0; n < 16; n += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, key.at(n * 8, 2 * k));
        ptx::mma_m16n8k32_e4m3(scores[n], a, b[0], b[1]);
        ptx::mma_m16n8k32_e4m3(scores[n + 1], a, b[2], b[3]);
      }
    }
  }

  // Sets the running maxima of a query tile's rows, from the logits of its first step's tile of
  // keys. `value_log2`: of its values, which P includes.
  __device__ __forceinline__ void set_maxima(float value_log2) {
    float greatest[2];
    greatest_logits(scores, greatest);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = greatest[half] == minus_infinity()
                          ? kNoMaximum
                          : ceilf(greatest[half] + value_log2) - kFirstPeakLog2;
      sum[half] = 0.0f;
    }
  }

  // Multiplies a row's sum and output so far by 2^-shift, and raises its running maximum by
  // `shift`.
  __device__ __forceinline__ void lower(int half, float shift) {
    const float factor = ptx::ex2_approx_ftz(-shift);  // exact, as shift is an integer
    maximum[half] += shift;
    sum[half] *= factor;
#pragma unroll
    for (auto& block : out) {
      block[2 * half] *= factor;
      block[2 * half + 1] *= factor;
    }
  }

  // Returns the greatest sum among the four threads that share a row.
  static __device__ __forceinline__ float greatest_sum(float sum) {
    sum = fmaxf(sum, __shfl_xor_sync(0xffffffff, sum, 1));
    return fmaxf(sum, __shfl_xor_sync(0xffffffff, sum, 2));
  }

  // Raises running maxima so that P of a row's greatest logit is at most 2^kRedonePeakLog2. All
  // rows of the warp are examined, also those whose sums were small enough: mma.sync rounds scores
  // differently from wgmma, both to about 14 bits. So a great logit may come out several units
  // higher, and its P would exceed e4m3.
  __device__ __forceinline__ void raise_maxima(float value_log2) {
    float greatest[2];
    greatest_logits(scores, greatest);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float raised = ceilf(greatest[half] + value_log2) - kRedonePeakLog2;
      if (!(raised > maximum[half])) continue;
      lower(half, raised - maximum[half]);
      maximum[half] = raised;  // the difference may have been rounded
    }
  }

  // Lowers P of rows whose sums are too great, by powers of two.
  __device__ __forceinline__ void lower_rows(float (&total)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float most = greatest_sum(total[half]);
      if (!(most > kFloat8SumLimit)) continue;
      // Sums are below 2^kLoweredLog2 then.
      const int exponent = (__float_as_int(most) >> 23) - 126;
      const float shift = static_cast<float>(exponent - kLoweredLog2);
      const float factor = ptx::ex2_approx_ftz(-shift);
      lower(half, shift);
      total[half] *= factor;
#pragma unroll
      for (auto& block : scores) {
        block[2 * half] *= factor;
        block[2 * half + 1] *= factor;
      }
    }
    float8_weights(scores, weights);
  }

  // Waits for the values of this tile. The parity depends on all exponentials: otherwise the
  // assembler would move these past the wait for the last P V. `flip` is 0, since sums are not
  // negative.
  __device__ __forceinline__ void await_value(const float (&total)[2]) const {
    const uint32_t flip = __any_sync(0xffffffff, fminf(total[0], total[1]) < 0.0f);
    ptx::mbarrier_wait(smem.value_full(stage.stage), stage.parity ^ flip);
  }

  // Computes a tile's P again, because some logits are far greater than those before. `total`: the
  // tile's sums, which are replaced.
  __device__ __forceinline__ void redo(const Rules& rules, float to_log2, float value_log2,
                                       float (&total)[2]) {
    compute_scores_again();
    make_logits(rules, to_log2);
    raise_maxima(value_log2);
    const float addend[2] = {value_log2 - maximum[0], value_log2 - maximum[1]};
    float8_exponentials(scores, 1.0f, addend, total);
    float8_weights(scores, weights);
  }

  // Computes P of a tile. kFresh: this is the first step of a query tile. kPending: there is P of
  // the last tile, whose P V is started. kPlain: products become logits by a factor alone.
  template <bool kFresh, bool kPending, bool kPlain = false>
  __device__ __forceinline__ void step() {
    Rules rules;
    if constexpr (!kPlain) rules = find_rules<kFresh>();
    ptx::mbarrier_wait(smem.key_full(stage.stage), stage.parity);
    const KeyFactors factors = factors_of(stage.stage);
    const float to_log2 = query_to_log2 * factors.key;
    start_scores();
    if constexpr (kPending) start_out();
    accumulates = !kFresh;
    ptx::wgmma_wait_group<kPending ? 1 : 0>();
    ptx::wgmma_results(scores);
    float factor = to_log2;
    if (!kPlain && rules.any()) {
      make_logits(rules, to_log2);
      factor = 1.0f;
    }
    const float last_sum[2] = {sum[0], sum[1]}, last_maximum[2] = {maximum[0], maximum[1]};
    if constexpr (kFresh) set_maxima(factors.value_log2);
    float total[2];
    const float addend[2] = {factors.value_log2 - maximum[0], factors.value_log2 - maximum[1]};
    float8_exponentials(scores, factor, addend, total);
    await_value(total);
    ptx::wgmma_wait_group<0>();
    if constexpr (kPending) release_value();
    float8_weights(scores, weights);
    if constexpr (kFresh && kPending) store_last(last_sum, last_maximum);
    if (__any_sync(0xffffffff, fmaxf(total[0], total[1]) > kFloat8SumLimit)) [[unlikely]] {
      if (__any_sync(0xffffffff, fmaxf(total[0], total[1]) > kFloat8RedoLimit)) {
        redo(rules, to_log2, factors.value_log2, total);
      } else {
        lower_rows(total);
      }
    }
    sum[0] = fmaf(total[0], factors.value_rest, sum[0]);
    sum[1] = fmaf(total[1], factors.value_rest, sum[1]);
    arrive_warp(smem.key_empty(stage.stage));
    stage.advance();
    --tile;
  }

  __device__ __forceinline__ void release_value() {
    ptx::wgmma_results(out);
    arrive_warp(smem.value_empty(last_stage()));
  }

  __device__ __forceinline__ KeyFactors factors_of(uint32_t stage) const {
    const uint4 words = ptx::ld_shared_v4(smem.factors_of(stage));
    return {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
            __uint_as_float(words.w)};
  }

  // Finds the tiles that the band does not cut. Rows that do not exist are masked in every tile, so
  // there are none for their warpgroup.
  __device__ __forceinline__ void find_uncut() {
    const Float8Work& of = work();
    const int32_t row0 = of.row0 + group() * 64;
    uncut = uncut_tiles<Config::kBlockKv>(of.band, row0);
    const bool lacks_rows = of.band.q_len < plan.q_len && row0 + 64 > of.band.q_len;
    if (__any_sync(0xffffffff, lacks_rows)) uncut.end = 0;
  }

  // Waits for the description of a query tile. Returns false if there is none.
  __device__ __forceinline__ bool begin_work() {
    ptx::mbarrier_wait(smem.query_full(query_stage.stage), query_stage.parity);
    // Reductions, whose results the compiler knows to be the same in all lanes.
    first = __reduce_max_sync(0xffffffff, work().tiles.first);
    tile = __reduce_max_sync(0xffffffff, work().tiles.end) - 1;
    find_uncut();
    query_to_log2 = work().to_log2;
    return __reduce_max_sync(0xffffffff, work().row0) >= 0;
  }

  // Stores the output of the query tile before this one, and releases the stage of that query tile.
  __device__ __forceinline__ void store_last(const float (&of_sum)[2],
                                             const float (&of_maximum)[2]) {
    static_assert(Config::kQueryStages == 2);
    const uint32_t last = query_stage.stage ^ 1;
    store(smem.works[last], of_sum, of_maximum);
    sync_and_arrive_warp(smem.query_empty(last));
  }

  // Writes out = O / l and lse.
  __device__ __forceinline__ void store(const Float8Work& of, const float (&of_sum)[2],
                                        const float (&of_maximum)[2]) {
    const int32_t rows = plan.q_len - of.row0 - warp_row();
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = of_sum[half];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      const int32_t row = fragment_row(0, 2 * half);
      const bool exists = of.row0 + warp_row() + row < of.band.q_len;
      const float sink = exists ? of.sink_log2 : minus_infinity();
      // Sums are relative to the greater of the keys' sum and the sink.
      const float log2_total =
          total == 0.0f ? minus_infinity() : ptx::lg2_approx_ftz(total) + of_maximum[half];
      const float top = ptx::max_nan(log2_total, sink);
      const float of_sink = sink == minus_infinity() ? 0.0f : ptx::ex2_approx_ftz(sink - top);
      const float of_keys =
          log2_total == minus_infinity() ? 0.0f : ptx::ex2_approx_ftz(log2_total - top);
      const float lse = (top + ptx::lg2_approx_ftz(of_keys + of_sink)) / kLog2E;
      factor[half] = total == 0.0f ? 0.0f : of.greatest / total * (of_keys / (of_keys + of_sink));
      if (threadIdx.x % 4 == 0 && row < rows) {
        of.lse[(warp_row() + row) * plan.lse.row] = top == minus_infinity() ? top : lse;
      }
    }
#pragma unroll
    for (auto& block : out) {
#pragma unroll
      for (int e = 0; e < 4; ++e) block[e] *= factor[e / 2];
    }
    const int64_t offset = warp_row() * plan.out.row;
    if (plan.out_dtype == DType::kBFloat16) {
      store_rows(static_cast<__nv_bfloat16*>(of.out) + offset, plan.out.row, rows, plan.value_dim,
                 1.0f, out);
    } else if (plan.out_dtype == DType::kFloat16) {
      store_rows(static_cast<__half*>(of.out) + offset, plan.out.row, rows, plan.value_dim, 1.0f,
                 out);
    } else {
      store_floats(static_cast<float*>(of.out) + offset, rows);
    }
  }

  __device__ __forceinline__ void store_floats(float* to, int32_t rows) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(0, 2 * half);
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
        *reinterpret_cast<float2*>(to + row * plan.out.row + fragment_col(n, 0)) =
            make_float2(out[n][2 * half], out[n][2 * half + 1]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    if (!begin_work()) return;
    step<true, false>();
    for (;;) {
      while (tile >= first) {
        if constexpr (Config::kHasPlainTiles) {
          const int32_t last = tile < uncut.end ? max(first, uncut.first) : tile + 1;
          while (tile >= last) step<false, true, true>();
          if (tile < first) break;
        }
        step<false, true>();
      }
      query_stage.advance();
      if (!begin_work()) break;
      step<true, true>();
    }
    start_out();
    ptx::wgmma_wait_group<0>();
    release_value();
    store_last(sum, maximum);
  }
};

}  // namespace jax_flash::sm90
