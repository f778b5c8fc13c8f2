// Computes the gradient of a bias with warpgroup products (wgmma), up to head dim 128. It does what
// modifiers/bias_gradient.cuh does, for tiles of 128 queries and 128 keys.
//
//   for each batch and head that add to the block's tile of dbias
//     S = Q K^T, dP = dO V^T   64 queries of a consumer by 128 keys
//     P = exp(S + bias - lse)  overlaps dP; other modifiers of the call apply, too
//     dbias += P (dP - delta)  registers
//
// Thread blocks are persistent. Each takes one tile of dbias after the other. A step is a tile of
// logits that adds to the tile of dbias.
//
// Warp roles:
//   warp 0      finds and describes the steps of a tile of dbias, and copies pairs of tiles (TMA)
//               through a ring: Q and K, then dO and V
//   warps 4-11  two consumer warpgroups of 64 queries each; neither waits for the other
//
// Shared memory holds the ring of pairs of tiles, and each warp's rows of the bias (bias_rows.cuh):
// all steps of a tile of dbias add the same elements of the bias to their logits. At the end, dbias
// replaces them before it is written row by row, and so do its sums over rows if dbias has a single
// row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/bias_gradient.cuh"
#include "modifiers/score_gradient.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/bias_rows.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/schedule.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/fragments.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/tensor_map.cuh"
#include "tile/wgmma_tile.cuh"

namespace jax_flash::sm90 {

template <int kHeadDimension>
struct BiasGradientConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kBlock = 128, kConsumers = 2;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static constexpr int kConsumerThreads = 128 * kConsumers;
  using Tile = SmemTile<kBlock, kHeadDim>;
  static constexpr int kPairBytes = 2 * Tile::kBytes;
  static constexpr int kStaticSmemBytes = 1024;  // bound for barriers and descriptions of steps
  static constexpr int kMostStages = 4;
  // Return the bytes for elements of the bias, and the number of pairs of tiles that fit with them.
  static constexpr int bias_bytes(bool rounded) { return kBlock * kBlock * (rounded ? 2 : 4); }
  static constexpr int stages(bool rounded) {
    const int fit = (kBackwardSmemLimit - kStaticSmemBytes - bias_bytes(rounded)) / kPairBytes;
    return fit < kMostStages ? fit : kMostStages;
  }
  static_assert(stages(true) >= 2);
  static constexpr int smem_bytes(bool rounded) {
    return stages(rounded) * kPairBytes + bias_bytes(rounded);
  }
};

// Describes a tile of dbias: the indices of element [0, 0] of its batch and head in the bias and in
// dbias, and its first row and column.
struct BiasGradientTile {
  int64_t bias, dbias;
  int32_t row0, col0;
};

// Describes a step: a tile of logits that adds to a tile of dbias. row0 is negative after the last
// step.
struct BiasStep {
  BiasGradientTile tile;
  Band band;
  int64_t batch_index;
  int32_t head, row0, col0;
};

// Holds the state of a ring with as many stages as the bias leaves room for.
struct PairRing {
  uint32_t stages, stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Returns the tile of dbias that a block computes in a round. The block's place among the round's
// tiles moves by one from round to round: otherwise, all its tiles would have about one distance
// from the diagonal.
__device__ __forceinline__ uint32_t bias_tile_of(uint32_t round) {
  return round * gridDim.x + (blockIdx.x + round) % gridDim.x;
}

// Visits the steps of a tile of dbias in order.
template <int kBlock>
struct BiasSteps {
  const Backward& params;
  const BackwardWorkspace& workspace;
  const BiasOwnership& ownership;
  int64_t own_batch;
  int32_t own_head, own_row, own_col;
  BiasGradientTile tile;

  int32_t first, end;  // the summed batches of this part

  // Describes part `block` % parts of tile `block` / parts.
  __device__ __forceinline__ BiasSteps(const Backward& backward, const BackwardWorkspace& space,
                                       const BiasOwnership& owned, const BiasParts& parts,
                                       uint32_t block)
      : params(backward), workspace(space), ownership(owned) {
    const auto part = static_cast<int32_t>(block % parts.parts);
    block /= parts.parts;
    first = part * static_cast<int32_t>(parts.terms);
    end = min(first + static_cast<int32_t>(parts.terms), static_cast<int32_t>(owned.summed));
    const auto take = [&](uint32_t count) {
      const uint32_t index = block % count;
      block /= count;
      return static_cast<int32_t>(index);
    };
    own_col = take(owned.owned_col_tiles);
    own_row = take(owned.owned_row_tiles);
    own_head = take(owned.owned_heads);
    own_batch = block;
    const BatchIndex batch(params.shape,
                           BiasOwnership::batch_index(params.shape, params.dbias, own_batch, 0));
    const auto start = [&](const Operand& operand) {
      return batch.offset(operand) + own_head * operand.head;
    };
    tile = {start(params.bias), start(params.dbias) + part * parts.elements, own_row * kBlock,
            own_col * kBlock};
  }

  // Calls visit(batch, step) for each step. Called by a whole warp. Finding a batch entry and its
  // band takes as long as a step's products, so each lane does it for another entry.
  template <typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
#pragma unroll 1
    for (int32_t next = first; next < end; next += 32) {
      const int32_t sum_batch = min(next + static_cast<int32_t>(threadIdx.x % 32), end - 1);
      const int64_t index =
          BiasOwnership::batch_index(params.shape, params.dbias, own_batch, sum_batch);
      const BatchIndex own_batch_index(params.shape, index);
      const Band own_band(params, own_batch_index);
      const int count = static_cast<int>(min(end - next, 32));
#pragma unroll 1
      for (int lane = 0; lane < count; ++lane) {
        const auto of_lane = [&](auto value) { return __shfl_sync(0xffffffff, value, lane); };
        BatchIndex batch;
        for (int axis = 0; axis < kTensorMapBatchDims; ++axis) {
          batch.coordinate[axis] = of_lane(own_batch_index.coordinate[axis]);
        }
        Band band;
        band.lo = of_lane(own_band.lo);
        band.hi = of_lane(own_band.hi);
        band.q_len = of_lane(own_band.q_len);
        band.kv_len = of_lane(own_band.kv_len);
        visit_batch(batch, band, of_lane(index), visit);
      }
    }
  }

 private:
  template <typename Visit>
  __device__ __forceinline__ void visit_batch(const BatchIndex& batch, const Band& band,
                                              int64_t batch_index, const Visit& visit) const {
    const BiasOwnership& own = ownership;
    for (int32_t row = own_row; row < own.row_tiles; row += own.owned_row_tiles) {
      for (int32_t col = own_col; col < own.col_tiles; col += own.owned_col_tiles) {
        if (!attends(band, batch_index, row, col)) continue;
        for (int32_t head = own_head; head < own.heads; head += own.owned_heads) {
          visit(batch, BiasStep{tile, band, batch_index, head, row * kBlock, col * kBlock});
        }
      }
    }
  }
  // Returns true if any row of tile `row` may attend to any key of tile `col`.
  __device__ __forceinline__ bool attends(const Band& band, int64_t batch_index, int32_t row,
                                          int32_t col) const {
    const Range range = kv_tiles<kBlock>(band, row * kBlock, (row + 1) * kBlock);
    if (col < range.first || col >= range.end) return false;
    const SegmentSpans& spans = workspace.spans;
    if (!spans.query) return true;
    const auto of = [&](const SegmentSpan* all, int32_t blocks, int32_t tile) {
      return tile_span<kBlock>(all + batch_index * blocks, blocks, tile);
    };
    return of(spans.query, spans.query_blocks, row).meets(of(spans.key, spans.key_blocks, col));
  }
};

// Holds the ring's barriers and, for each stage that has Q and K, the description of their step.
struct BiasRing {
  uint32_t root, full, empty;
  BiasStep* steps;
};

// Prefetches a tile's elements of the bias to L2: consumers read them when they begin the tile.
template <int kBlock>
__device__ __forceinline__ void prefetch_bias(const BiasGradientTile& tile, const Operand& bias,
                                              int32_t rows) {
  if (bias.col != 1) return;
  const int bytes = bias.dtype == DType::kFloat32 ? 4 : 2, lines = kBlock * bytes / 128;
  const char* first = static_cast<const char*>(bias.data) + (tile.bias + tile.col0) * bytes;
  for (int i = threadIdx.x % 32; i < kBlock * lines; i += 32) {
    const int64_t row = min(tile.row0 + i / lines, rows - 1);
    ptx::prefetch_l2(first + row * bias.row * bytes + i % lines * 128);
  }
}

// Describes all steps of a tile of dbias and copies their pairs of tiles. Called by a warp.
template <typename Config>
__device__ __forceinline__ void load_pairs(const BiasSteps<Config::kBlock>& steps,
                                           const BackwardMaps& maps, const BiasRing& smem,
                                           PairRing& ring) {
  using Tile = typename Config::Tile;
  const Backward& params = steps.params;
  const int32_t group = params.shape.heads / params.shape.kv_heads;
  const int lane = threadIdx.x % 32;
  const auto await_stage = [&] {
    ptx::mbarrier_wait(smem.empty + ring.stage * 8, ring.parity ^ 1);
  };
  steps.for_each([&](const BatchIndex& batch, const BiasStep& step) {
    // Each of the first lanes copies a panel of a tile.
    const auto load = [&](const CUtensorMap& rows, const Operand& row_operand,
                          const CUtensorMap& cols, const Operand& col_operand) {
      const uint32_t barrier = smem.full + ring.stage * 8;
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(barrier, Config::kPairBytes);
      __syncwarp();
      if (lane < 2 * Tile::kPanels) {
        const bool is_rows = lane < Tile::kPanels;
        const int panel = lane % Tile::kPanels;
        ptx::fence_proxy_async_shared();
        load_box(smem.root + ring.stage * Config::kPairBytes + lane * Tile::kPanelBytes,
                 is_rows ? rows : cols, barrier, is_rows ? row_operand : col_operand, batch,
                 is_rows ? step.head : step.head / group, is_rows ? step.row0 : step.col0,
                 panel * 64);
      }
      __syncwarp();
      ring.advance();
    };
    await_stage();
    if (lane == 0) smem.steps[ring.stage] = step;
    load(maps.query, params.query, maps.key, params.key);
    await_stage();
    load(maps.dout, params.dout, maps.value, params.value);
  });
  await_stage();
  if (lane == 0) {
    BiasStep end = {};
    end.tile = steps.tile;
    end.row0 = -Config::kBlock;
    smem.steps[ring.stage] = end;
    ptx::mbarrier_arrive(smem.full + ring.stage * 8);
  }
  ring.advance();
}

// Sums dbias of a consumer's 64 queries and 128 keys over the steps of a tile. kModifiers: kBias if
// the call has no other modifier.
template <typename Config, typename Element, uint32_t kModifiers>
struct BiasConsumer {
  static constexpr int kN = Config::kBlock / 8;
  static constexpr bool kOnly = kModifiers == kBias;
  using Tile = typename Config::Tile;
  using Products = float[1][kN][4];
  using Total = float[1][kN][4];

  // Describes a thread's two rows in a step.
  struct Statistics {
    int32_t row0;  // the warp's first row
    float lse[1][2], delta[1][2];
    float lse_low[2];  // kOnly: low part of lse, in log2 units (ScoreGradient)
  };

  const Backward& params;
  const BackwardWorkspace& workspace;
  const BiasRing& smem;
  PairRing& ring;
  uint32_t rows_root;  // address of the rows of the bias
  bool rounded;
  int group;  // 0 or 1

  // Sums the steps of one tile of dbias. Returns the tile.
  __device__ __forceinline__ BiasGradientTile run(Total& total) const {
    Products p, dp;
    clear(total[0]);
    BiasStep step;
    for (bool first = true; await_step(step); first = false) {
      const uint32_t pair = ring.stage;  // Q and K
      start(p[0], pair);
      Statistics rows;
      read_rows(step, rows);
      ring.advance();
      // Other modifiers need the registers of dP.
      if constexpr (kOnly) start_second(dp);
      if (kOnly && first) load_bias(step.tile);
      if constexpr (kOnly) read_low_parts(step, rows);
      await<kOnly>(p);
      sync_and_arrive_warp(smem.empty + pair * 8);
      find_probabilities(p, step, rows);
      if constexpr (kOnly) await_full(find_zero(p));
      if constexpr (!kOnly) start_second(dp);
      await<0>(dp);
      release();
      add(total, p, dp, step, rows);
    }
    release();
    return step.tile;
  }

  // Calls body(rows) with the BiasRows that fit the types of the bias and of dbias.
  template <typename Body>
  __device__ __forceinline__ void with_rows(const Body& body) const {
    if (rounded) {
      body(BiasRows<Config, Element, true>(rows_root));
    } else {
      body(BiasRows<Config, Element, false>(rows_root));
    }
  }

 private:
  __device__ __forceinline__ void release() const {
    sync_and_arrive_warp(smem.empty + ring.stage * 8);
    ring.advance();
  }
  // Waits for the ring's next pair. P should overlap products, but ptxas tends to move the
  // computation of P behind the wait for the products. Therefore another wait for the pair precedes
  // that wait, and depends on P: `flip` is find_zero(P).
  __device__ __forceinline__ void await_full(uint32_t flip) const {
    ptx::mbarrier_wait(smem.full + ring.stage * 8, ring.parity ^ flip);
  }
  // Returns 0, because P is not negative. The compiler cannot know this.
  static __device__ __forceinline__ uint32_t find_zero(const Products& p) {
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) bits |= __float_as_uint(p[0][n][e]);
    }
    return __any_sync(0xffffffff, __uint_as_float(bits) < 0.0f);
  }
  // Waits for Q and K of the next step and reads its description. Returns false after the last step
  // of a tile.
  __device__ __forceinline__ bool await_step(BiasStep& step) const {
    await_full(0);
    step = smem.steps[ring.stage];
    return __reduce_max_sync(0xffffffff, step.row0) >= 0;
  }
  __device__ __forceinline__ void read_rows(const BiasStep& step, Statistics& rows) const {
    rows.row0 = step.row0 + group * 64 + threadIdx.x % 128 / 32 * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index = workspace.row_index(step.batch_index * params.shape.heads + step.head,
                                                rows.row0 + fragment_row(0, 2 * half));
      rows.lse[0][half] = workspace.lse_log2[index];
      rows.delta[0][half] = workspace.delta[index];
    }
  }
  // Reads the low part of lse if it matters (is_extreme()). Called while products are in flight.
  __device__ __forceinline__ void read_low_parts(const BiasStep& step, Statistics& rows) const {
    rows.lse_low[0] = rows.lse_low[1] = 0.0f;
    if (!__any_sync(0xffffffff, is_extreme(rows.lse[0][0]) || is_extreme(rows.lse[0][1]))) return;
    const BatchIndex batch(params.shape, step.batch_index);
    const float* lse_low = batch.template pointer<const float>(params.lse_low, step.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(rows.row0 + fragment_row(0, 2 * half), params.shape.q_len - 1);
      rows.lse_low[half] = lse_low[row * params.lse_low.row] * kLog2E;
    }
  }
  __device__ __forceinline__ void start_second(Products& products) const {
    await_full(0);
    start(products[0], ring.stage);
  }
  // Starts the product of a stage's pair of tiles.
  __device__ __forceinline__ void start(float (&products)[kN][4], uint32_t stage) const {
    // The reduction puts the address, and the descriptors that derive from it, into uniform
    // registers.
    const uint32_t at = __reduce_max_sync(0xffffffff, smem.root + stage * Config::kPairBytes);
    const Tile queries{at, group * 64u * 128}, keys{at, Tile::kBytes};
    forget(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 16; ++k) {
      ptx::Wgmma<Element, Config::kBlock>::template ss<0, 0>(
          products, operand_k_major(queries, 0, k), operand_k_major(keys, 0, k), k > 0);
    }
    ptx::wgmma_commit_group();
  }
  template <int kPending>
  static __device__ __forceinline__ void await(Products& products) {
    ptx::wgmma_wait_group<kPending>();
    ptx::wgmma_results(products[0]);
  }
  __device__ __forceinline__ void load_bias(const BiasGradientTile& tile) const {
    with_rows([&](const auto& rows) {
      rows.load(params.bias, tile.bias, tile.row0 + (threadIdx.x / 32 - 4) * 16, tile.col0,
                {params.shape.q_len, params.shape.kv_len});
    });
  }

  // Turns products S into P.
  __device__ __forceinline__ void find_probabilities(Products& scores, const BiasStep& step,
                                                     const Statistics& rows) const {
    const int32_t row0 = rows.row0, col0 = step.col0;
    if constexpr (kOnly) {
      with_rows([&](const auto& bias) { bias.add_to(scores[0], params.options.scale); });
      const bool all_allowed = row0 + 16 <= step.band.q_len &&
                               step.band.all_allowed(row0, row0 + 16, col0, col0 + Config::kBlock);
      if (!__all_sync(0xffffffff, all_allowed)) mask_rows(scores, step.band, row0, col0);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float difference = scores[0][n][e] - rows.lse[0][e / 2];
          scores[0][n][e] = ptx::ex2_approx_ftz(fmaf(difference, kLog2E, -rows.lse_low[e / 2]));
        }
      }
    } else {
      const BatchIndex batch(params.shape, step.batch_index);
      modify_tile<kModifiers>(scores, params, batch, step.head, step.band, row0, col0);
      ScoreGradient<true, 1, kN, Element>(params, batch, step.head, row0, col0)
          .probabilities(scores[0], rows.lse[0], 1.0f, 0, 0, kN);
    }
  }
  // Sets pairs that the band does not allow, and rows beyond the end, to -inf.
  static __device__ __forceinline__ void mask_rows(Products& scores, const Band& band, int32_t row0,
                                                   int32_t col0) {
    mask_band(scores, band, row0, col0);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row0 + fragment_row(0, e) >= band.q_len) scores[0][n][e] = minus_infinity();
      }
    }
  }
  // Adds a step's dS to the sums.
  __device__ __forceinline__ void add(Total& total, Products& p, Products& dp, const BiasStep& step,
                                      const Statistics& rows) const {
    if constexpr (!kOnly) {
      const BatchIndex batch(params.shape, step.batch_index);
      ScoreGradient<true, 1, kN, Element>(params, batch, step.head, rows.row0, step.col0)
          .finish(p, dp, rows.lse, rows.delta);
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = total[0][n][e];
        if constexpr (kOnly) {
          // An element that is not allowed has P = 0, and its dP may be NaN.
          const float added = fmaf(p[0][n][e], dp[0][n][e] - rows.delta[0][e / 2], sum);
          sum = p[0][n][e] == 0.0f ? sum : added;
        } else {
          sum += dp[0][n][e];
        }
      }
    }
  }
};

// Sums over a tile's rows in a fixed order. Called by both consumers. All rows then hold the sum.
template <typename Config, int kN>
__device__ __forceinline__ void sum_bias_rows(float (&total)[kN][4], float* partial_smem) {
  constexpr int kWarps = 4 * Config::kConsumers;
  const int warp = threadIdx.x / 32 - 4;
  ptx::barrier_sync(kConsumers, Config::kConsumerThreads);  // the bias is no longer needed
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = total[n][e] + total[n][e + 2];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
      }
      if (threadIdx.x % 32 < 4) partial_smem[warp * Config::kBlock + fragment_col(n, e)] = sum;
    }
  }
  ptx::barrier_sync(kConsumers, Config::kConsumerThreads);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float sum = 0.0f;
#pragma unroll 1
      for (int other = 0; other < kWarps; ++other) {
        sum += partial_smem[other * Config::kBlock + fragment_col(n, e)];
      }
      total[n][e] = sum;
    }
  }
  ptx::barrier_sync(kConsumers, Config::kConsumerThreads);
}

// Writes a warp's part of a tile of dbias.
template <typename Config, typename Consumer>
__device__ __forceinline__ void store_bias_gradient(const Consumer& consumer,
                                                    const BiasGradientTile& tile,
                                                    float (&total)[1][Config::kBlock / 8][4],
                                                    float* partial_smem) {
  const Shape& shape = consumer.params.shape;
  const Operand& dbias = consumer.params.dbias;
  if (dbias.row == 0) sum_bias_rows<Config>(total[0], partial_smem);
  if (dbias.col == 0) sum_cols(total);
  consumer.with_rows([&](const auto& rows) {
    rows.put(total[0]);
    rows.store(dbias, tile.dbias, tile.row0 + (threadIdx.x / 32 - 4) * 16, tile.col0,
               {dbias.row ? shape.q_len : 1, dbias.col ? shape.kv_len : 1});
  });
}

// Returns true if the bias and dbias are kept in the operands' type in shared memory.
template <typename Element>
__host__ __device__ __forceinline__ bool bias_is_rounded(const Backward& params) {
  constexpr DType kDType =
      std::is_same_v<Element, __nv_bfloat16> ? DType::kBFloat16 : DType::kFloat16;
  return params.bias.dtype == kDType && params.dbias.dtype == kDType;
}

template <typename Config, typename Element, uint32_t kModifiers>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_bias_gradient_kernel(const __grid_constant__ Backward params,
                              const __grid_constant__ BackwardMaps maps,
                              const BackwardWorkspace workspace,
                              const __grid_constant__ BiasOwnership ownership,
                              const __grid_constant__ BiasParts parts) {
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[2 * Config::kMostStages];
  __shared__ BiasStep steps_smem[Config::kMostStages];
  const uint32_t barriers = ptx::shared_address(barriers_smem);
  const BiasRing smem{ptx::shared_address(tiles_smem), barriers, barriers + 8 * Config::kMostStages,
                      steps_smem};
  const bool rounded = bias_is_rounded<Element>(params);
  PairRing ring{static_cast<uint32_t>(Config::stages(rounded))};
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < ring.stages; ++stage) {
      ptx::mbarrier_init(smem.full + stage * 8, 1);
      ptx::mbarrier_init(smem.empty + stage * 8, Config::kConsumers * 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const auto tiles = static_cast<uint32_t>(ownership.blocks() * parts.parts);
  const uint32_t rounds = (tiles + gridDim.x - 1) / gridDim.x;
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x >= 32) return;
    for (uint32_t round = 0; round < rounds; ++round) {
      const uint32_t tile = bias_tile_of(round);
      if (tile >= tiles) continue;
      const BiasSteps<Config::kBlock> steps(params, workspace, ownership, parts, tile);
      prefetch_bias<Config::kBlock>(steps.tile, params.bias, params.shape.q_len);
      load_pairs<Config>(steps, maps, smem, ring);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const int group = __reduce_max_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128 - 1);
    const uint32_t rows_at = ring.stages * Config::kPairBytes;
    const BiasConsumer<Config, Element, kModifiers> consumer{
        params, workspace, smem, ring, smem.root + rows_at, rounded, group};
    float total[1][Config::kBlock / 8][4];
    for (uint32_t round = 0; round < rounds; ++round) {
      if (bias_tile_of(round) >= tiles) continue;
      const BiasGradientTile tile = consumer.run(total);
      store_bias_gradient<Config>(consumer, tile, total,
                                  reinterpret_cast<float*>(tiles_smem + rows_at));
    }
  }
}

// Launches the kernel if dbias has enough tiles, or parts of tiles, for all multiprocessors.
// `launched`: true if it did.
template <typename Element, int kHeadDim>
Status launch_wide_bias_gradient(const Backward& params, const BackwardWorkspace& workspace,
                                 cudaStream_t stream, bool& launched) {
  using Config = BiasGradientConfig<kHeadDim>;
  launched = false;
  if (!params.dbias) return {};
  const BiasOwnership ownership(params.shape, params.dbias, Config::kBlock);
  int sms = 0;
  Status status = multiprocessors(sms);
  // Two rounds of the multiprocessors. Batch entries can be divided.
  const BiasParts parts(params, workspace, ownership, ownership.summed, 2 * kSplitBlocks);
  if (!status.ok() || ownership.blocks() * parts.parts < sms) return status;
  BackwardMaps maps;
  status = make_backward_maps(params, Config::kBlock, Config::kBlock, maps);
  if (!status.ok()) return status;
  launched = true;
  const Backward partial = parts.of(params);
  const bool rounded = bias_is_rounded<Element>(partial);
  const auto launch = [&](auto* kernel) {
    return launch_kernel("sm90::wide_bias_gradient_kernel", params.shape, kernel, sms,
                         Config::kThreads, Config::smem_bytes(rounded), stream, partial, maps,
                         workspace, ownership, parts);
  };
  status = modifiers_of(params) == kBias
               ? launch(wide_bias_gradient_kernel<Config, Element, kBias>)
               : launch(wide_bias_gradient_kernel<Config, Element, kEveryModifier>);
  return status.ok() ? launch_bias_parts(params, parts, stream) : status;
}

}  // namespace jax_flash::sm90
