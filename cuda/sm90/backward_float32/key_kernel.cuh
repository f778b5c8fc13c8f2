// Computes dK and dV of float32 operands with warpgroup-level matrix instructions of TF32, or of
// float16 for operands that are split (sm90/split_tiles.cuh).
//
//   for each query head of the group, for each tile of rows that may attend to the block's keys
//     S^T = K Q^T,  dP^T = V dO^T
//     P^T = 2^(scale log2(e) S^T - lse),  dS^T = P^T (dP^T - delta)   lse in log2 units
//     dV += P^T dO,  dK += dS^T Q                                     P^T and dS^T from registers
//
// With modifiers, S becomes logits before the exponential (sm90/float32_logits.cuh). A block owns
// 128 keys of a head, each of two consumer warpgroups 64 of them. The first warp of the first
// warpgroup starts the copies. In shared memory are the block's tiles of K, those of V, and a ring
// of slots, which Q, dO, and dO and Q transposed take in turn; split ones are not transposed. All
// products of a step are awaited before the next step starts: there are no registers for those of
// two. Above head dim 128, or 64 if operands are split, the two blocks of a cluster own the same
// keys, and half of the columns each (config.cuh). If there are
// few blocks, several of them, or several clusters, share the same keys. Each takes a part of the
// queries, and float32_key_sums_kernel adds their dK and dV.
#pragma once

#include <cstdint>

#include "modifiers/score_gradient_transposed.cuh"
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
#include "sm90/key_mask.cuh"
#include "sm90/ring.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/block_place.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

template <int kHeadDim, bool kSplit>
using Float32KeyConfig = Float32ConfigOf<kHeadDim, 2, kSplit>;

// Names what a block works on. It is in shared memory, since registers are scarce.
struct Float32KeyWork {
  int32_t group, kv_head, key0;  // group: query heads of the key/value head
  int64_t batch_index;
  Float32Places places;
  Band band;
  Range steps;        // of kRows query rows of a head
  Range visits;       // the steps that this block takes, counted over all heads of the group
  int64_t key_index;  // of the block's first key tile in the workspace
  int32_t own_tiles;  // the number of its key tiles that exist
};

// Called by a whole warp.
template <typename Config>
__device__ __forceinline__ Float32KeyWork describe_keys(const Backward& params,
                                                        const Float32Gradient& tiles) {
  constexpr int kKeys = Config::kOwnRows;
  const Shape& shape = params.shape;
  const uint32_t block = blockIdx.x / Config::kBlocks, part = block % tiles.parts;
  const KeyTilePlace<kKeys> place(params, block / tiles.parts, false);
  Float32KeyWork work;
  work.group = shape.heads / shape.kv_heads;
  work.kv_head = place.kv_head;
  work.key0 = place.tile * kKeys;
  work.batch_index = place.batch_index;
  work.places = Float32Places(params, BatchIndex(shape, place.batch_index));
  work.band = Band(params, work.places.batch);
  work.steps = q_tiles<Config::kRows>(work.band, work.key0, work.key0 + kKeys);
  const int32_t first = work.key0 / Config::kTileRows;
  work.key_index = (place.batch_index * shape.kv_heads + place.kv_head) * tiles.key_tiles + first;
  work.own_tiles = min(tiles.key_tiles - first, Config::kConsumers);
  if (last_key_tile(tiles.bits + work.key_index, 0, work.own_tiles) < 0) work.steps = {0, 0};
  const int64_t visits = int64_t{work.group} * max(work.steps.end - work.steps.first, 0);
  work.visits = {static_cast<int32_t>(visits * part / tiles.parts),
                 static_cast<int32_t>(visits * (part + 1) / tiles.parts)};
  return work;
}

// Walks over the block's part of the steps.
struct Float32Visits {
  const Float32KeyWork& work;
  int32_t count, left, head, step;

  __device__ __forceinline__ explicit Float32Visits(const Float32KeyWork& block)
      : work(block),
        count(block.steps.end - block.steps.first),
        left(block.visits.end - block.visits.first) {
    if (left <= 0) return;
    const int32_t heads = work.visits.first / count;
    head = work.kv_head * work.group + heads;
    step = work.steps.first + work.visits.first - heads * count;
  }
  __device__ __forceinline__ void advance() {
    --left;
    if (++step < work.steps.end) return;
    step = work.steps.first;
    ++head;
  }
};

template <typename Config>
__device__ __forceinline__ void produce_queries(const Backward& params,
                                                const BackwardWorkspace& workspace,
                                                const Float32Gradient& tiles,
                                                const Float32KeyWork& work,
                                                const Float32BackwardSmem<Config>& smem) {
  constexpr int kParts = Config::kTileRows / Config::kRows;
  Float32Visits at(work);
  if (at.left <= 0) return;
  const Shape& shape = params.shape;
  Float32BackwardProducer<Config> producer{smem};
  const int64_t own = Config::place(work.key_index);
  ptx::mbarrier_arrive_expect_tx(smem.own_full(), 2 * Config::kConsumers * Config::kOwnBytes);
  producer.load_own(0, tiles.key + own, work.own_tiles);
  producer.load_own(1, tiles.value + own, work.own_tiles);
  for (; at.left > 0; at.advance()) {
    const int64_t head = work.batch_index * shape.heads + at.head;
    const int64_t tile = Config::place(head * tiles.query_tiles + at.step / kParts);
    const int part = at.step % kParts;
    const int64_t row = workspace.row_index(head, at.step * Config::kRows);
    producer.load_plain(tiles.query + tile, part, workspace.lse_log2 + row);
    producer.load_plain(tiles.dout + tile, part, workspace.delta + row);
    if constexpr (!Config::kSplit) {
      producer.load_transposed(tiles.dout_transposed + tile, part);
      producer.load_transposed(tiles.query_transposed + tile, part);
    }
  }
}

// kModifiers: those that the call may have.
template <typename Config, uint32_t kModifiers>
struct Float32KeyConsumer {
  static constexpr int kN = Config::kRows / 8, kGradientN = Config::kHeadDim / 8;
  static constexpr bool kGeneral = kModifiers != kNoModifier, kSplit = Config::kSplit;
  static_assert(Config::kSlots >= (kSplit ? 2 : 4));  // a step uses so many at a time
  static_assert(kGeneral || !kSplit);
  // If true, dV starts before dS is computed: there are registers for P beside the rounded P.
  static constexpr bool kValuesFirst =
      kModifiers == kFloat32Elements && Config::kRows == 32 && Config::kBlocks == 1;
  using Gradient = TransposedGradient<kModifiers, kN, false, false, kSplit>;
  using Logits = Float32Logits<kModifiers, kN, true>;
  const Backward& params;
  const Float32KeyWork& work;
  const Float32BackwardSmem<Config>& smem;
  float to_log2;
  float2 key_factors, value_factors;  // of products with this thread's rows of split operands
  uint32_t allowed;  // bit 0: some query may attend to the thread's first key; bit 8: to the other

  float scores[kN][4], dscores[kN][4];
  static constexpr int kSteps = kOperandSteps<kN, kSplit>;
  uint32_t weights[kSteps][4], dweights[kSteps][4];  // P and dS, rounded or split
  ProductSum<kGradientN, kSplit> dkey, dvalue;
  RingState<Config::kSlots> slot;
  uint32_t parity = 0;  // of the number of steps

  // Sets scores to -inf where the query may not attend to the key, for a call without modifiers.
  __device__ __forceinline__ void mask(int32_t row0) {
    forbid_key_rows(scores, allowed);
    if (work.band.all_allowed(row0, min(row0 + Config::kRows, work.band.q_len),
                              work.key0 + consumer_group() * 64,
                              work.key0 + consumer_group() * 64 + 64)) {
      return;
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int32_t row = row0 + fragment_col(n, e);
        const int32_t key = work.key0 + consumer_row() + fragment_row(0, e);
        const bool allowed = key >= work.band.first_col(row) && key < work.band.end_col(row);
        scores[n][e] = allowed ? scores[n][e] : minus_infinity();
      }
    }
  }

  // Computes P from S.
  __device__ __forceinline__ void exponentials() {
    const float* lse = smem.statistics[slot.stage];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 of = *reinterpret_cast<const float2*>(lse + fragment_col(n, 0));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] =
            ptx::ex2_approx_ftz(fmaf(scores[n][e], to_log2, -(e % 2 == 0 ? of.x : of.y)));
      }
    }
  }
  // Computes dS from P and dP.
  __device__ __forceinline__ void differentiate() {
    const float* delta = smem.statistics[slot.next(1).stage];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 of = *reinterpret_cast<const float2*>(delta + fragment_col(n, 0));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dscores[n][e] = scores[n][e] * (dscores[n][e] - (e % 2 == 0 ? of.x : of.y));
      }
    }
  }

  // Does the same as mask(), exponentials() and differentiate(), for a call with modifiers, and
  // rounds P.
  __device__ __forceinline__ void modify(const Logits& logits) {
    const Gradient gradient{params, work.places.batch, logits.head, logits.col0, logits.row0};
    const float* lse = smem.statistics[slot.stage];
    logits.apply(reinterpret_cast<float (&)[1][kN][4]>(scores));
    gradient.probabilities(scores, ColumnsInShared(lse), lse, to_log2);
    const Kept kept = gradient.draw();
    if constexpr (kValuesFirst) {
      round_operands(scores, weights);
      start_values();
      ptx::wgmma_wait_group<1>();  // dP
      ptx::wgmma_results(dscores);
    }
    receive_sums(smem, Float32Mail::kScoreGradients, parity, dscores);
    gradient.finish(scores, dscores, lse, smem.statistics[slot.next(1).stage], kept);
    if constexpr (!kValuesFirst) {
      gradient.drop(scores, kept);
      round_operands(scores, weights);
    }
  }

  // Starts dV += P^T dO.
  __device__ __forceinline__ void start_values() {
    smem.await(slot, 2);
    dvalue.start(weights, smem.transposed(slot.next(2).stage));
  }

  // Starts S and dP.
  __device__ __forceinline__ void start_scores() {
    smem.await(slot, 0);
    start_product<Config::kHeadDim, kSplit>(scores, smem.own(0, consumer_group()),
                                            smem.plain(slot.stage));
    smem.await(slot, 1);
    start_product<Config::kHeadDim, kSplit>(dscores, smem.own(1, consumer_group()),
                                            smem.plain(slot.next(1).stage));
  }

  // The slots from `slot` on hold Q, dO, and dO and Q transposed.
  // `at` moves to the next step. With modifiers, elements of that step are loaded during dV and dK.
  __device__ __forceinline__ void step(Float32Visits& at, [[maybe_unused]] Logits& logits) {
    start_scores();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores);
    send_sums(smem, Float32Mail::kScores, scores);
    if constexpr (kGeneral) {
      if constexpr (!kValuesFirst) {
        ptx::wgmma_wait_group<0>();
        ptx::wgmma_results(dscores);
      }
      receive_sums(smem, Float32Mail::kScores, parity, scores);
      send_sums(smem, Float32Mail::kScoreGradients, dscores);
      modify(logits);
      parity ^= 1;
    } else {
      mask(at.step * Config::kRows);
      exponentials();
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_results(dscores);
      round_operands(scores, weights);
      differentiate();
    }
    round_operands(dscores, dweights);
    __syncwarp();
    arrive_warp(smem.empty(slot.stage));
    arrive_warp(smem.empty(slot.next(1).stage));
    if constexpr (!kValuesFirst) start_values();
    smem.await(slot, 3);
    dkey.start(dweights, smem.transposed(slot.next(3).stage));
    at.advance();
    if constexpr (kGeneral) load(at, logits);
    ptx::wgmma_wait_group<0>();
    dvalue.finish();
    dkey.finish();
    arrive_warp(smem.empty(slot.next(2).stage));
    arrive_warp(smem.empty(slot.next(3).stage));
    slot.advance(4);
  }

  // Computes P from S, and starts dV += P^T dO of split operands. Returns the factors of products
  // with P, and sets the elements that dropout keeps.
  __device__ __forceinline__ float2 start_split_values(const Gradient& gradient,
                                                       const Logits& logits, uint32_t dout,
                                                       Kept& kept) {
    const float* lse = smem.statistics[slot.stage];
    logits.apply(reinterpret_cast<float (&)[1][kN][4]>(scores));
    gradient.probabilities(scores, ColumnsInShared(lse), lse, to_log2);
    kept = gradient.draw();
    float dropped[kN][4];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dropped[n][e] = scores[n][e];
    }
    gradient.drop(dropped, kept);
    const float2 factors = split_operands(dropped, weights, smem.magnitudes[dout]);
    dvalue.start(weights, smem.plain(dout));
    return factors;
  }

  // Does what step() does for split operands. The slots from `slot` on hold Q and dO, which are
  // read in both orders. dS is computed during dV. There are no registers for products of dV and dK
  // at the same time.
  __device__ __forceinline__ void split_step(Float32Visits& at, Logits& logits) {
    const Gradient gradient{params, work.places.batch, logits.head, logits.col0, logits.row0};
    const uint32_t query = slot.stage, dout = slot.next(1).stage;
    start_scores();
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_results(scores);
    multiply_all(scores, key_factors, smem.magnitudes[query]);
    send_sums(smem, Float32Mail::kScores, scores);
    const auto take_dscores = [&] {
      ptx::wgmma_results(dscores);
      multiply_all(dscores, value_factors, smem.magnitudes[dout]);
    };
    if constexpr (Config::kBlocks > 1) {
      ptx::wgmma_wait_group<0>();
      take_dscores();
    }
    receive_sums(smem, Float32Mail::kScores, parity, scores);
    send_sums(smem, Float32Mail::kScoreGradients, dscores);
    Kept kept;
    const float2 of_weights = start_split_values(gradient, logits, dout, kept);
    if constexpr (Config::kBlocks == 1) {
      ptx::wgmma_wait_group<1>();
      take_dscores();
    }
    receive_sums(smem, Float32Mail::kScoreGradients, parity, dscores);
    parity ^= 1;
    gradient.finish(scores, dscores, smem.statistics[query], smem.statistics[dout], kept);
    const float2 of_dweights = split_operands(dscores, dweights, smem.magnitudes[query]);
    ptx::wgmma_wait_group<0>();
    dvalue.finish(of_weights.x, of_weights.y);
    dkey.start(dweights, smem.plain(query));
    at.advance();
    load(at, logits);
    ptx::wgmma_wait_group<0>();
    dkey.finish(of_dweights.x, of_dweights.y);
    sync_and_arrive_warp(smem.empty(query));
    arrive_warp(smem.empty(dout));
    slot.advance(2);
  }

  __device__ __forceinline__ void load(const Float32Visits& at, Logits& logits) const {
    if (at.left <= 0) return;
    logits.load(at.head, at.step * Config::kRows, work.key0 + consumer_row());
  }

  __device__ __forceinline__ void find_allowed(const KeyBits* bits) {
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4 * 2;  // of eight keys
    const uint32_t word =
        consumer_group() < work.own_tiles ? bits[consumer_group()].words[lane / 8] : 0;
    const uint32_t keys = word >> (2 * block + lane / 4 % 2);
    allowed = (keys & 1) | (keys >> 2 & 1) << 8;
  }

  __device__ __forceinline__ void run(const Float32Gradient& tiles) {
    find_allowed(tiles.bits + work.key_index);
    if constexpr (kSplit) {
      const int64_t own = Config::place(work.key_index);
      key_factors = own_factors<Config>(tiles.key + own, work.own_tiles);
      value_factors = own_factors<Config>(tiles.value + own, work.own_tiles);
    }
    set_zero(dkey.sum);
    set_zero(dvalue.sum);
    Float32Visits at(work);
    Logits logits(params, work.places, work.band);
    if constexpr (kGeneral) load(at, logits);
    if (at.left > 0) ptx::mbarrier_wait(smem.own_full(), 0);
    while (at.left > 0) {
      if constexpr (kSplit) {
        split_step(at, logits);
      } else {
        step(at, logits);
      }
    }
    const Shape& shape = params.shape;
    const int32_t key = work.key0 + consumer_row(), col = Config::first_col();
    const auto rows_of = [&](const Operand& operand, float* parts, int32_t cols) {
      if (tiles.parts == 1) {
        return Float32Rows(
            work.places.batch.pointer<float>(operand, work.kv_head) + key * operand.row + col,
            operand.row, cols - col);
      }
      const int64_t head =
          (blockIdx.x / Config::kBlocks % tiles.parts * shape.batch + work.batch_index) *
              shape.kv_heads +
          work.kv_head;
      return Float32Rows(parts + (head * shape.kv_len + key) * cols + col, cols, cols - col);
    };
    const int32_t left = shape.kv_len - key;
    store_gradient(rows_of(params.dkey, tiles.dkey, shape.head_dim), left, params.options.scale,
                   dkey.sum[0]);
    store_gradient(rows_of(params.dvalue, tiles.dvalue, shape.value_dim), left, 1.0f,
                   dvalue.sum[0]);
  }
};

// Adds the parts of dK and dV, in order. Each warp takes a key; the grid has all keys of all heads.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    float32_key_sums_kernel(const __grid_constant__ Backward params, const Float32Gradient tiles) {
  const Shape& shape = params.shape;
  const int64_t heads = shape.batch * shape.kv_heads, keys = heads * shape.kv_len;
  const int64_t index = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (index >= keys) return;
  const int64_t batch_head = index / shape.kv_len, key = index - batch_head * shape.kv_len;
  const int64_t batch_index = batch_head / shape.kv_heads;
  const auto kv_head = static_cast<int32_t>(batch_head - batch_index * shape.kv_heads);
  const BatchIndex batch(shape, batch_index);
  const auto add = [&](const Operand& to, const float* parts, int32_t cols) {
    float* const row = batch.pointer<float>(to, kv_head) + key * to.row;
    for (int32_t col = threadIdx.x % 32; col < cols; col += 32) {
      float sum = 0.0f;
      for (int32_t part = 0; part < tiles.parts; ++part) {
        sum += parts[(part * keys + index) * cols + col];
      }
      row[col] = sum;
    }
  };
  add(params.dkey, tiles.dkey, shape.head_dim);
  add(params.dvalue, tiles.dvalue, shape.value_dim);
}

template <typename Config, uint32_t kModifiers>
__global__ void __cluster_dims__(Config::kBlocks, 1, 1) __launch_bounds__(Config::kThreads, 1)
    float32_key_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                       const Float32Gradient tiles) {
  run_block<Config>([&] { return describe_keys<Config>(params, tiles); },
                    [&](const Float32KeyWork& work, const auto& smem) {
                      if (threadIdx.x == 0)
                        produce_queries<Config>(params, workspace, tiles, work, smem);
                    },
                    [&](const Float32KeyWork& work, const auto& smem) {
                      Float32KeyConsumer<Config, kModifiers>{params, work, smem,
                                                             params.options.scale * kLog2E}
                          .run(tiles);
                    });
}

}  // namespace jax_flash::sm90
