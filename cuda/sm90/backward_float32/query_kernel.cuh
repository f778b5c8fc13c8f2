// Computes dQ of float32 operands with warpgroup-level matrix instructions of TF32, or of float16
// for operands that are split (sm90/split_tiles.cuh).
//
//   for each tile of keys that some row of the block may attend to
//     S = Q K^T,  dP = dO V^T                               dO from registers
//     P = 2^(scale log2(e) S - lse),  dS = P (dP - delta)   lse in log2 units
//     dQ += dS K                                            dS from registers
//
// With modifiers, S becomes logits before the exponential (sm90/float32_logits.cuh), and dS may be
// added to the bias's gradient. A block owns 128 rows of a head, each of two consumer
// warpgroups 64 of them. The first warp of the first warpgroup starts the copies. In shared memory
// are the block's tiles of Q, and a ring of slots, which K, V, and K transposed take in turn. S of
// a step starts before dQ of the step before is done, unless operands are split. Above head dim
// 128, or 64 if operands are split, the two blocks of a cluster own the same rows, and half of the
// columns each (config.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/added_bias_gradient.cuh"
#include "modifiers/score_gradient.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/float32_tiles.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward_float32/config.cuh"
#include "sm90/float32_logits.cuh"
#include "sm90/float32_products.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/block_place.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

template <int kHeadDim, bool kSplit>
using Float32QueryConfig = Float32ConfigOf<kHeadDim, 1, kSplit>;

// Names what a block works on. It is in shared memory, since registers are scarce.
struct Float32QueryWork {
  int32_t head, row0;
  int64_t batch_index;
  Float32Places places;
  Band band;
  Range tiles;        // of keys
  int64_t key_index;  // of the head's first key tile in the workspace
  int32_t last;       // the last tile with a key that some query may attend to

  __device__ __forceinline__ bool has_keys() const { return last >= tiles.first; }
};

// Called by a whole warp.
template <typename Config>
__device__ __forceinline__ Float32QueryWork describe_queries(const Backward& params,
                                                             const Float32Gradient& tiles) {
  constexpr int kQueries = Config::kOwnRows;
  const Shape& shape = params.shape;
  const QueryTilePlace<kQueries> place(params, blockIdx.x / Config::kBlocks, true);
  Float32QueryWork work;
  work.head = place.head;
  work.row0 = place.tile * kQueries;
  work.batch_index = place.batch_index;
  work.places = Float32Places(params, BatchIndex(shape, place.batch_index));
  work.band = Band(params, work.places.batch);
  work.tiles = kv_tiles<Config::kTileRows>(work.band, work.row0, work.row0 + kQueries);
  const int64_t kv_head =
      place.batch_index * shape.kv_heads + place.head / (shape.heads / shape.kv_heads);
  work.key_index = kv_head * tiles.key_tiles;
  work.last = last_key_tile(tiles.bits + work.key_index, work.tiles.first, work.tiles.end);
  return work;
}

// Called by one warp, whose first lane starts the copies.
template <typename Config>
__device__ __forceinline__ void produce_keys(const Shape& shape, const Float32Gradient& tiles,
                                             const Float32QueryWork& work,
                                             const Float32BackwardSmem<Config>& smem) {
  constexpr int kParts = Config::kTileRows / Config::kRows;
  if (!work.has_keys()) return;
  const bool leads = threadIdx.x % 32 == 0;
  Float32BackwardProducer<Config> producer{smem};
  const int32_t first = work.row0 / Config::kTileRows;
  const int64_t own =
      Config::place((work.batch_index * shape.heads + work.head) * tiles.query_tiles + first);
  if (leads) {
    ptx::mbarrier_arrive_expect_tx(smem.own_full(), Config::kConsumers * Config::kOwnBytes);
    producer.load_own(0, tiles.query + own, tiles.query_tiles - first);
  }
  for (int32_t tile = work.last; tile >= work.tiles.first;) {
    const int64_t index = work.key_index + tile, at = Config::place(index);
    const int32_t next = last_key_tile(tiles.bits + work.key_index, work.tiles.first, tile);
    const bool last = next < work.tiles.first;
    if (leads) {
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        producer.load_keys(tiles.key + at, part, tiles.bits + index, tile * kParts + part,
                           last && part == kParts - 1);
        producer.load_plain(tiles.value + at, part);
        producer.load_transposed(tiles.key_transposed + at, part);
      }
    }
    __syncwarp();
    tile = next;
  }
}

// kModifiers: those that the call may have.
template <typename Config, uint32_t kModifiers>
struct Float32QueryConsumer {
  static constexpr int kN = Config::kRows / 8, kGradientN = Config::kHeadDim / 8;
  static constexpr bool kGeneral = kModifiers != kNoModifier, kSplit = Config::kSplit;
  using Gradient = ScoreGradient<true, 1, kN, std::conditional_t<kSplit, Tf32x3, Tf32>>;
  using Logits = Float32Logits<kModifiers, kN, false>;
  const Backward& params;
  const Float32QueryWork& work;
  const Float32BackwardSmem<Config>& smem;
  float to_log2;
  float2 query_factors, dout_factors;  // of products with this thread's rows of split operands

  uint32_t dout[kOperandSteps<kGradientN, kSplit>][4];
  float scores[1][kN][4], dscores[1][kN][4];
  uint32_t dweights[kOperandSteps<kN, kSplit>][4];  // dS, rounded or split
  ProductSum<kGradientN, kSplit> dquery;
  float lse[1][2], delta[1][2];  // of the thread's rows
  RingState<Config::kSlots> slot;
  uint32_t parity = 0;  // of the number of steps

  // Sets scores to -inf where the query may not attend to the key, for a call without modifiers.
  __device__ __forceinline__ void mask(int32_t col0) {
    constexpr int kBits = 2 * kN;  // of a thread's keys
    const int32_t row0 = work.row0 + consumer_group() * 64;
    const uint32_t of_tile = smem.keys[slot.stage].bits.words[threadIdx.x % 4];
    const uint32_t keys = of_tile >> col0 % Config::kTileRows / 32 * kBits & kAllBits<kN>;
    const bool edge =
        !work.band.all_allowed(row0, min(row0 + 64, work.band.q_len), col0, col0 + Config::kRows);
    if (!edge && __all_sync(0xffffffff, keys == kAllBits<kN>)) return;
    AllowedBits allowed = {{keys, keys}};
    if (edge) forbid_edges(allowed, work.band, work.row0 + consumer_row(), col0);
    forbid<kN>(scores[0], allowed, 0);
  }

  // Computes P from S.
  __device__ __forceinline__ void exponentials() {
#pragma unroll
    for (auto& block : scores[0]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        block[e] = ptx::ex2_approx_ftz(fmaf(block[e], to_log2, -lse[0][e / 2]));
      }
    }
  }
  // Computes dS from P and dP.
  __device__ __forceinline__ void differentiate() {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float p = scores[0][n][e], ds = p * (dscores[0][n][e] - delta[0][e / 2]);
        // A pair that is not allowed has dS = 0, even if its dP is NaN.
        dscores[0][n][e] = kGeneral && p == 0.0f ? 0.0f : ds;
      }
    }
  }

  // Multiplies dP of split operands by its factors.
  __device__ __forceinline__ void scale_gradients() {
    if constexpr (kSplit) {
      multiply_all(dscores[0], dout_factors, smem.magnitudes[slot.next(1).stage]);
    }
  }

  // Adds dQ of split dS and K, whose slot is the third of the step, and frees the step's slots. A
  // load of magnitudes just before a slot's release has returned those of the slot's next tile
  // (TUNING_float32.md). Here, what depends on them has been computed.
  __device__ __forceinline__ void add_split_products() {
    smem.await(slot, 2);
    const uint32_t key = slot.next(2).stage;
    const float2 of_rows = split_operands(dscores[0], dweights, smem.magnitudes[key]);
    dquery.start(dweights, smem.transposed(key));
    ptx::wgmma_wait_group<0>();
    dquery.finish(of_rows.x, of_rows.y);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 3; ++i) arrive_warp(smem.empty(slot.next(i).stage));
  }

  // The slots from `slot` on hold K, V, and K transposed. Returns whether this is the last step.
  // kFirst: no dQ of a previous step is pending.
  template <bool kFirst>
  __device__ __forceinline__ bool step() {
    smem.await(slot, 0);
    // Reductions, whose results the compiler knows to be the same in all lanes.
    const int32_t tile = __reduce_max_sync(0xffffffff, smem.keys[slot.stage].tile);
    const bool last = __any_sync(0xffffffff, smem.keys[slot.stage].last);
    const int32_t row0 = work.row0 + consumer_row(), col0 = tile * Config::kRows;
    [[maybe_unused]] Logits logits(params, work.places, work.band);
    if constexpr (kGeneral) logits.load(work.head, row0, col0);
    start_product<Config::kHeadDim, kSplit>(scores[0], smem.own(0, consumer_group()),
                                            smem.plain(slot.stage));
    if constexpr (!kFirst) {
      ptx::wgmma_wait_group<1>();  // dQ of the previous step is done
      dquery.finish();
      arrive_warp(smem.empty((slot.stage + Config::kSlots - 1) % Config::kSlots));
    }
    smem.await(slot, 1);
    start_product_from_registers<kSplit>(dscores[0], dout, smem.plain(slot.next(1).stage));
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores[0]);
    if constexpr (kSplit) multiply_all(scores[0], query_factors, smem.magnitudes[slot.stage]);
    [[maybe_unused]] const Gradient gradient(params, work.places.batch, work.head, row0, col0);
    if constexpr (!kGeneral) mask(col0);
    if constexpr (!kSplit) sync_and_arrive_warp(smem.empty(slot.stage));
    send_sums(smem, Float32Mail::kScores, scores[0]);
    if constexpr (Config::kBlocks > 1) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(dscores[0]);
      scale_gradients();
      receive_sums(smem, Float32Mail::kScores, parity, scores[0]);
      send_sums(smem, Float32Mail::kScoreGradients, dscores[0]);
    }
    if constexpr (kGeneral) {
      logits.apply(scores);
      gradient.probabilities(scores[0], lse[0], to_log2, 0, 0, kN);
    } else {
      exponentials();
    }
    if constexpr (Config::kBlocks == 1 || !kSplit) {
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(dscores[0]);
      scale_gradients();
    }
    if constexpr (!kSplit) arrive_warp(smem.empty(slot.next(1).stage));
    receive_sums(smem, Float32Mail::kScoreGradients, parity, dscores[0]);
    parity ^= 1;
    if constexpr ((kModifiers & (kSoftCap | kDropout)) != 0) {
      gradient.finish(scores, dscores, lse, delta);
    } else {
      differentiate();
    }
    // Both blocks of a cluster have the same dS, so one of them adds it.
    if (kGeneral && Config::part() == 0) {
      add_bias_gradient(params, work.places.batch, work.head, row0, col0, dscores);
    }
    if constexpr (kSplit) {
      add_split_products();
    } else {
      round_operands(dscores[0], dweights);
      smem.await(slot, 2);
      dquery.start(dweights, smem.transposed(slot.next(2).stage));
    }
    slot.advance(3);
    return last;
  }

  __device__ __forceinline__ void run(const BackwardWorkspace& workspace,
                                      const Float32Gradient& tiles) {
    const Shape& shape = params.shape;
    const int32_t row = work.row0 + consumer_row();
    set_zero(dquery.sum);
    if (work.has_keys()) {
      const int64_t head = work.batch_index * shape.heads + work.head;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t own = row + fragment_row(0, 2 * half);
        const int64_t index = workspace.row_index(head, own);
        lse[0][half] = own < shape.q_len ? workspace.lse_log2[index] : -minus_infinity();
        delta[0][half] = own < shape.q_len ? workspace.delta[index] : 0.0f;
      }
      const Operand& from = params.dout;
      const int32_t col = Config::first_col();
      const float* first =
          work.places.batch.pointer<const float>(from, work.head) + row * from.row + col;
      const bool vectors = from.row % 4 == 0 && shape.value_dim % 4 == 0 &&
                           reinterpret_cast<uintptr_t>(first) % 16 == 0;
      const int32_t rows = work.band.q_len - row, cols = shape.value_dim - col;
      if constexpr (kSplit) {
        dout_factors = read_split_operands(dout, first, from.row, rows, cols, vectors);
        const int32_t tile = work.row0 / Config::kTileRows;
        query_factors = own_factors<Config>(
            tiles.query + Config::place(head * tiles.query_tiles + tile), tiles.query_tiles - tile);
      } else {
        read_operands(dout, first, from.row, rows, cols, vectors);
      }
      ptx::mbarrier_wait(smem.own_full(), 0);
      if constexpr (kSplit) {
        while (!step<true>()) continue;
      } else {
        bool last = step<true>();
        while (!last) last = step<false>();
        ptx::wgmma_wait_group<0>();
        dquery.finish();
      }
    }
    const Operand& to = params.dquery;
    const int32_t col = Config::first_col();
    store_gradient(Float32Rows(work.places.batch.pointer<float>(to, work.head) + row * to.row + col,
                               to.row, shape.head_dim - col),
                   shape.q_len - row, params.options.scale, dquery.sum[0]);
  }
};

template <typename Config, uint32_t kModifiers>
__global__ void __cluster_dims__(Config::kBlocks, 1, 1) __launch_bounds__(Config::kThreads, 1)
    float32_query_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                         const Float32Gradient tiles) {
  run_block<Config>([&] { return describe_queries<Config>(params, tiles); },
                    [&](const Float32QueryWork& work, const auto& smem) {
                      produce_keys<Config>(params.shape, tiles, work, smem);
                    },
                    [&](const Float32QueryWork& work, const auto& smem) {
                      Float32QueryConsumer<Config, kModifiers>{params, work, smem,
                                                               params.options.scale * kLog2E}
                          .run(workspace, tiles);
                    });
}

}  // namespace jax_flash::sm90
