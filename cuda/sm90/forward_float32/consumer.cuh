// Implements a consumer warpgroup of Hopper's forward kernel for float32, which owns 64 rows of
// each query tile. It keeps Q in registers, or above head dim 128 (64 if operands are split) in
// shared memory, and walks over key tiles from the last to the first. A step is:
//
//   start S of this tile; start P V of the last tile; await S; mask; exponentials; await P V; lower
//   O if a running maximum has risen; round P
//
// The two consumers do not wait for each other. With modifiers, there are no registers for P of one
// tile beside elements of the bias or mask of another; above head dim 128, there is no shared
// memory for V of one tile beside K of the next but one. A step is then:
//
//   start S; await S; logits; lower O; exponentials; round P; start P V; start loads of elements of
//   the next tile; await P V
//
// Tiles of V then have zeros in place of NaN and infinity. After the last step, these are added to
// O of the rows that attend to their keys.
#pragma once

#include <cstdint>

#include "modifiers/logits.cuh"
#include "params.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tf32.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/float32_logits.cuh"
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

// kModifiers: those that the call may have.
template <typename Config, uint32_t kModifiers>
struct Float32Consumer {
  static constexpr int kScoreN = Config::kBlockKv / 8, kOutN = Config::kHeadDim / 8;
  static constexpr bool kGeneral = kModifiers != kNoModifier;
  static constexpr bool kQueryInSmem = Config::kQueryInSmem, kSplit = Config::kSplit;
  static constexpr int kQuerySteps = kOperandSteps<Config::kHeadDim / 8, kSplit>;
  static_assert(kGeneral || !kSplit);
  using Softmax = OnlineSoftmax<1, kGeneral>;
  using Logits = Float32Logits<kModifiers, kScoreN, false>;

  const Forward& params;
  const Float32Plan& plan;
  const Float32Smem<Config>& smem;

  uint32_t query[kQueryInSmem ? 1 : kQuerySteps][4];
  float2 query_factors;  // of products with this thread's rows of split Q
  float scores[1][kScoreN][4];
  uint32_t weights[kOperandSteps<kScoreN, kSplit>][4];  // P
  ProductSum<kOutN, kSplit> out;                        // O
  RingState<Config::kQueryStages> query_stage;
  RingState<Config::kSlots> slot;  // of K, which V follows
  // The next two are computed wherever they are used, since registers are scarce.
  static __device__ __forceinline__ int group() { return threadIdx.x / kWarpgroup - 1; }
  static __device__ __forceinline__ int warp_row() {  // in the query tile
    return threadIdx.x / 32 * 16 - 64;
  }

  __device__ __forceinline__ const Float32Work& work() const {
    return smem.works[query_stage.stage];
  }

  // Reads Q to registers, or copies it to shared memory.
  __device__ __forceinline__ void read_query() {
    const Float32Work& of = work();
    const auto read = [&](auto& to) {
      const float* const first = of.query + warp_row() * plan.query.row;
      const int32_t rows = of.band.q_len - of.row0 - warp_row();
      if constexpr (kSplit) {
        query_factors =
            read_split_operands(to, first, plan.query.row, rows, plan.head_dim, plan.vectors);
      } else {
        read_operands(to, first, plan.query.row, rows, plan.head_dim, plan.vectors);
      }
    };
    if constexpr (kQueryInSmem) {
      uint32_t operands[kQuerySteps][4];  // in registers that O takes later
      read(operands);
      ptx::barrier_sync(kQueryBarrier + group(), kWarpgroup);  // all warps have used the last Q
      store_operands(smem.query(group()), warp_row() - group() * 64, operands);
      ptx::fence_proxy_async_shared();
      ptx::barrier_sync(kQueryBarrier + group(), kWarpgroup);
    } else {
      read(query);
    }
  }

  // Starts S of the keys in `slot`.
  __device__ __forceinline__ void start_scores() {
    if constexpr (kQueryInSmem) {
      start_product<Config::kHeadDim, kSplit>(scores[0], smem.query(group()), smem.key(slot.stage));
    } else {
      start_product_from_registers<kSplit>(scores[0], query, smem.key(slot.stage));
    }
  }

  // Returns the slot of the last V.
  __device__ __forceinline__ uint32_t last_slot() const {
    return slot.stage == 0 ? Config::kSlots - 1 : slot.stage - 1;
  }
  __device__ __forceinline__ void await_key() const {
    ptx::mbarrier_wait(smem.full(slot.stage), slot.parity);
  }

  // Rounds P. The accumulator columns 2 t and 2 t + 1 serve as operand columns t and t + 4
  // (sm90/float32_tiles.cuh). The addition may lose a NaN, but then the row's sum is NaN.
  __device__ __forceinline__ void round_weights() {
    constexpr int kElement[4] = {0, 2, 1, 3};
#pragma unroll
    for (int k = 0; k < kScoreN; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = __float_as_uint(scores[0][k][kElement[i]]) + ptx::kHalfTf32;
      }
    }
  }

  // Waits for the values of this tile. The parity depends on all exponentials: otherwise the
  // assembler would move these past the wait for the last P V. `flip` is 0, since sums are not
  // negative.
  __device__ __forceinline__ void await_value(const Softmax& softmax) const {
    const uint32_t flip =
        __any_sync(0xffffffff, fminf(softmax.sum[0][0], softmax.sum[0][1]) < 0.0f);
    const auto value = slot.next(1);
    ptx::mbarrier_wait(smem.full(value.stage), value.parity ^ flip);
  }

  // Sets scores to -inf where an edge or a mask forbids the key.
  __device__ __forceinline__ void mask(int32_t tile, const Range& uncut) {
    const uint32_t keys = smem.keys[slot.stage].bits.words[threadIdx.x % 4];
    const bool edge = tile < uncut.first || tile >= uncut.end;
    if (!edge && __all_sync(0xffffffff, keys == kAllBits<kScoreN>)) return;
    AllowedBits allowed = {{keys, keys}};
    if (edge) {
      const Float32Work& of = work();
      forbid_edges(allowed, of.band, of.row0 + warp_row(), tile * Config::kBlockKv);
    }
    forbid<kScoreN>(scores[0], allowed, 0);
  }

  // Returns whether a query may attend to a key.
  __device__ __forceinline__ bool allows(int32_t row, int32_t key) const {
    const Float32Work& of = work();
    const LogitModifiers modifiers(params, of.places.batch, of.head);
    if (!modifiers.allows(of.band, row, key)) return false;
    float added = modifiers.distance.present ? modifiers.distance.at(row, key) : 0.0f;
    if (params.bias) {
      added +=
          load_float(params.bias, modifiers.bias0 + row * params.bias.row + key * params.bias.col);
    }
    return added != minus_infinity();
  }

  // Adds a key's values that are not finite to O of the rows that attend to it. NaN and infinity do
  // not change when a positive P multiplies them. If P is 0 after rounding, its product with
  // infinity would be NaN; infinity is added all the same.
  __device__ __forceinline__ void add_bad_value(int32_t key) {
    const Float32Work& of = work();
    const float* value =
        of.places.batch.template pointer<const float>(params.value, of.head / plan.group) +
        key * params.value.row;
    int32_t col0 = threadIdx.x % 4 * 4;
    asm volatile("" : "+r"(col0));  // otherwise all columns would be kept in registers
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = of.row0 + warp_row() + fragment_row(0, 2 * half);
      if (row >= of.band.q_len || !allows(row, key)) continue;
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {  // the columns are those of Float32Rows
          const int32_t col = col0 + n / 2 * 16 + 2 * e + n % 2;
          float x = col < plan.value_dim ? value[col] : 0.0f;
          if (!kSplit && is_finite(x)) {  // rounding turns the greatest numbers into infinity
            x = __uint_as_float(ptx::round_to_tf32(__float_as_uint(x)) & ptx::kTf32Bits);
          }
          if (!is_finite(x)) out.sum[0][n][2 * half + e] += x;
        }
      }
    }
  }
  // Does so for all keys that rows of the query tile may attend to. Few calls have such values.
  __device__ __forceinline__ void add_bad_values() {
    const Float32Work& of = work();
    const Range tiles = kv_tiles<Config::kBlockKv>(of.band, of.row0, of.row0 + Config::kBlockQ);
    for (int32_t first = tiles.first; first < tiles.end; first += 32) {
      const int32_t mine = first + threadIdx.x % 32;
      uint4 words = {};
      if (mine < tiles.end) words = *reinterpret_cast<const uint4*>(of.bad + mine);
      uint32_t found = __ballot_sync(0xffffffff, (words.x | words.y | words.z | words.w) != 0);
      for (; found != 0; found &= found - 1) {
        const int32_t tile = first + __ffs(found) - 1;
#pragma unroll 1
        for (int place = 0; place < Config::kBlockKv; ++place) {
          if (of.bad[tile].has(place)) add_bad_value(tile * Config::kBlockKv + place);
        }
      }
    }
  }

  // Removes dropped elements from P.
  __device__ __forceinline__ void drop(int32_t col0) {
    if (params.options.dropout_threshold == 0) return;
    const Float32Work& of = work();
    const Kept kept = LogitModifiers(params, of.places.batch, of.head)
                          .template kept<kScoreN>(of.row0 + warp_row(), col0);
#pragma unroll
    for (int n = 0; n < kScoreN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!kept.template at<false>(n, e)) scores[0][n][e] = 0.0f;
      }
    }
  }

  // Computes P of a tile, and returns whether it is the query tile's last. kFirst: it is the first;
  // otherwise P V of the tile before is started.
  template <bool kFirst>
  __device__ __forceinline__ bool step(Softmax& softmax, const Range& uncut) {
    await_key();
    start_scores();
    if constexpr (!kFirst) out.start(weights, smem.value(last_slot()));
    ptx::wgmma_wait_group<kFirst ? 0 : 1>();
    ptx::wgmma_results(scores[0]);
    // Reductions, whose results the compiler knows to be the same in all lanes.
    const int32_t tile = __reduce_max_sync(0xffffffff, smem.keys[slot.stage].tile);
    const bool last = __any_sync(0xffffffff, smem.keys[slot.stage].last);
    mask(tile, uncut);
    sync_and_arrive_warp(smem.empty(slot.stage));
    float factor[1][2];
    const bool rises = softmax.template raise_maximum<2>(scores, plan.to_log2, factor);
#pragma unroll
    for (auto& block : scores[0]) softmax.exponentials(block, 0, plan.to_log2);
    await_value(softmax);
    if constexpr (!kFirst) {
      finish_out();
      if (rises) Softmax::rescale(out.sum, factor);
    }
    round_weights();
    slot.advance();
    slot.advance();
    return last;
  }

  // Waits for the keys of a tile, and starts to load elements of its bias or mask.
  __device__ __forceinline__ void begin(Logits& logits) const {
    await_key();
    const int32_t tile = __reduce_max_sync(0xffffffff, smem.keys[slot.stage].tile);
    logits.load(work().head, work().row0 + warp_row(), tile * Config::kBlockKv);
  }

  // Processes a tile of a call with modifiers, P V included, and begins the next one during P V.
  __device__ __forceinline__ bool modified_step(Softmax& softmax, Logits& logits) {
    start_scores();
    const bool last = __any_sync(0xffffffff, smem.keys[slot.stage].last);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(scores[0]);
    if constexpr (kSplit) multiply_all(scores[0], query_factors, smem.magnitudes[slot.stage]);
    logits.apply(scores);
    if constexpr (!kSplit) sync_and_arrive_warp(smem.empty(slot.stage));
    float factor[1][2];
    if (softmax.template raise_maximum<2>(scores, plan.to_log2, factor)) {
      Softmax::rescale(out.sum, factor);
    }
#pragma unroll
    for (auto& block : scores[0]) softmax.exponentials(block, 0, plan.to_log2);
    const auto value = slot.next(1);
    ptx::mbarrier_wait(smem.full(value.stage), value.parity);
    if constexpr ((kModifiers & kDropout) != 0) drop(logits.col0);
    float2 of_weights = {};  // factors of products with split P
    if constexpr (kSplit) {
      of_weights = split_operands(scores[0], weights, smem.magnitudes[value.stage]);
    } else {
      round_operands(scores[0], weights);
    }
    out.start(weights, smem.value(value.stage));
    // A load of magnitudes just before the slot's release has returned those of the slot's next
    // tile (TUNING_float32.md). Here, what depends on them has been computed.
    if constexpr (kSplit) sync_and_arrive_warp(smem.empty(slot.stage));
    slot.advance();
    slot.advance();
    if (!last) begin(logits);
    finish_out(of_weights);
    return last;
  }

  // Waits for the P V that was started last, and frees its stage. `of_weights`: the factors of
  // products with split P.
  __device__ __forceinline__ void finish_out(float2 of_weights = {}) {
    ptx::wgmma_wait_group<0>();
    out.finish(of_weights.x, of_weights.y);
    arrive_warp(smem.empty(last_slot()));
  }

  // Writes out = O / l and lse.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const Float32Work& of = work();
    const Float32Rows rows(of.out, plan.out.row, plan.value_dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = warp_row() + fragment_row(0, 2 * half);
      float lse, lse_low = 0.0f, normalizer;
      if constexpr (kGeneral) {
        softmax.template finish<kSplit>(0, half, plan.to_log2, of.sink, lse, lse_low, normalizer);
        normalizer *= params.options.dropout_scale;
      } else {
        softmax.finish(0, half, plan.to_log2, of.sink, lse, normalizer);
      }
      if (of.row0 + row >= of.band.q_len) {
        lse = minus_infinity();
        lse_low = normalizer = 0.0f;
      }
#pragma unroll
      for (auto& block : out.sum[0]) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          block[e] = normalizer == 0.0f ? 0.0f : block[e] * normalizer;
        }
      }
      if (of.row0 + row >= plan.q_len) continue;
      if (threadIdx.x % 4 == 0) {
        of.lse[row * plan.lse.row] = lse;
        if (kGeneral && params.lse_low) {
          of.places.batch.template pointer<float>(
              params.lse_low, of.head)[(of.row0 + row) * params.lse_low.row] = lse_low;
        }
      }
      rows.store(row, half, out.sum[0]);
    }
  }

  // Computes the query tile that work() describes.
  __device__ __forceinline__ void attend() {
    const Range uncut = uncut_tiles<Config::kBlockKv>(work().band, work().row0 + group() * 64);
    Softmax softmax;
    if (__any_sync(0xffffffff, work().has_keys)) {
      read_query();
      set_zero(out.sum);  // not before: Q may need the registers
      if constexpr (kGeneral) {
        Logits logits(params, work().places, work().band);
        begin(logits);
        while (!modified_step(softmax, logits)) continue;
        add_bad_values();
      } else {
        bool last = step<true>(softmax, uncut);
        while (!last) last = step<false>(softmax, uncut);
        out.start(weights, smem.value(last_slot()));
        finish_out();
      }
    } else {
      set_zero(out.sum);
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
