// Computes a bias's gradient by warpgroup-level products, up to head dim 128: what
// modifiers/bias_gradient.cuh does, for tiles of 128 queries and 128 keys.
//
//   for each batch and head that add to the block's tile of dbias
//     S = Q K^T, dP = dO V^T   64 queries of a consumer by 128 keys
//     P = exp(S + bias - lse)  beside dP; and whatever else the call has
//     dbias += P (dP - delta)  registers
//
// Blocks are persistent. Warp roles: one thread of warp 0 finds the steps of one tile of dbias
// after the other, describes them, and copies pairs of tiles (TMA) through a ring, Q and K, then dO
// and V; two consumer warpgroups own 64 queries each, and neither waits for the other.
//
// Shared memory holds a ring of pairs of tiles, and each warp's rows of the bias: all steps add the
// same elements of it to their logits, those whose gradient the block owns. dbias takes their place
// before it is written by rows; and so do its sums over rows, where it has one row.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "modifiers/band.cuh"
#include "modifiers/bias.cuh"
#include "modifiers/bias_gradient.cuh"
#include "modifiers/score_gradient.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm90/backward/config.cuh"
#include "sm90/backward/fragments.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/producer.cuh"
#include "sm90/backward/schedule.cuh"
#include "sm90/backward/smem.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
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
  static constexpr int kStaticSmemBytes = 1024;  // most for barriers and descriptions of steps
  static constexpr int kMostStages = 4;
  // Returns the bytes for elements of the bias, and the pairs of tiles that fit beside them.
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

// Describes a tile of logits that adds to the block's tile of dbias. row0 is negative behind the
// last one.
struct BiasStep {
  Band band;
  int64_t batch_index;
  int32_t head, row0, col0;
};

// The state of a ring with as many stages as the bias leaves room for.
struct PairRing {
  uint32_t stages, stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Visits the steps of a tile of dbias in order.
struct BiasSteps {
  const Backward& params;
  const BackwardWorkspace& workspace;
  const BiasOwnership& ownership;
  int64_t own_batch;
  int32_t own_head, own_row, own_col;

  __device__ __forceinline__ BiasSteps(const Backward& backward, const BackwardWorkspace& space,
                                       const BiasOwnership& owned, uint32_t block)
      : params(backward), workspace(space), ownership(owned) {
    const auto take = [&](uint32_t count) {
      const uint32_t index = block % count;
      block /= count;
      return static_cast<int32_t>(index);
    };
    own_col = take(owned.owned_col_tiles);
    own_row = take(owned.owned_row_tiles);
    own_head = take(owned.owned_heads);
    own_batch = block;
  }

  __device__ __forceinline__ int64_t first_batch() const {
    return BiasOwnership::batch_index(params.shape, params.dbias, own_batch, 0);
  }
  // Calls visit(batch, step) for each step, by a whole warp. To find a batch entry and its band
  // takes as long as a step's products: each lane does it for another one.
  template <int kBlock, typename Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    const BiasOwnership& own = ownership;
    for (int64_t first = 0; first < own.summed; first += 32) {
      const int64_t sum_batch = min(first + threadIdx.x % 32, own.summed - 1);
      const int64_t index =
          BiasOwnership::batch_index(params.shape, params.dbias, own_batch, sum_batch);
      const BatchIndex own_batch_index(params.shape, index);
      const Band own_band(params, own_batch_index);
      const int count = static_cast<int>(min(own.summed - first, int64_t{32}));
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
        visit_batch<kBlock>(batch, band, of_lane(index), visit);
      }
    }
  }

 private:
  template <int kBlock, typename Visit>
  __device__ __forceinline__ void visit_batch(const BatchIndex& batch, const Band& band,
                                              int64_t batch_index, const Visit& visit) const {
    const BiasOwnership& own = ownership;
    for (int32_t row = own_row; row < own.row_tiles; row += own.owned_row_tiles) {
      for (int32_t col = own_col; col < own.col_tiles; col += own.owned_col_tiles) {
        if (!attends<kBlock>(band, batch_index, row, col)) continue;
        for (int32_t head = own_head; head < own.heads; head += own.owned_heads) {
          visit(batch, BiasStep{band, batch_index, head, row * kBlock, col * kBlock});
        }
      }
    }
  }
  // Returns whether any row of a tile may attend to any key of one.
  template <int kBlock>
  __device__ __forceinline__ bool attends(const Band& band, int64_t batch_index, int32_t row,
                                          int32_t col) const {
    const TileRange range = kv_tiles<kBlock>(band, row * kBlock, (row + 1) * kBlock);
    if (col < range.first || col >= range.end) return false;
    const SegmentSpans& spans = workspace.spans;
    if (!spans.query) return true;
    const auto of = [&](const SegmentSpan* all, int32_t blocks, int32_t tile) {
      return tile_span<kBlock>(all + batch_index * blocks, blocks, tile);
    };
    return of(spans.query, spans.query_blocks, row).meets(of(spans.key, spans.key_blocks, col));
  }
};

// Holds the ring's barriers and the description of the step whose Q and K each stage has.
struct BiasRing {
  uint32_t root, full, empty;
  BiasStep* steps;
};

// Describes all steps of a tile of dbias and copies their pairs. Called by a warp, whose first lane
// does it.
template <typename Config>
__device__ __forceinline__ void load_pairs(const BiasSteps& steps, const BackwardMaps& maps,
                                           const BiasRing& smem, PairRing& ring) {
  using Tile = typename Config::Tile;
  const Backward& params = steps.params;
  const int32_t group = params.shape.heads / params.shape.kv_heads;
  const bool leader = threadIdx.x % 32 == 0;
  const auto await_stage = [&] {
    ptx::mbarrier_wait(smem.empty + ring.stage * 8, ring.parity ^ 1);
  };
  steps.template for_each<Config::kBlock>([&](const BatchIndex& batch, const BiasStep& step) {
    const auto load = [&](const CUtensorMap& rows, const Operand& row_operand,
                          const CUtensorMap& cols, const Operand& col_operand) {
      const uint32_t barrier = smem.full + ring.stage * 8;
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive_expect_tx(barrier, Config::kPairBytes);
      const int32_t at = ring.stage * Config::kPairBytes;
      load_tile_panels(Tile{smem.root, static_cast<uint32_t>(at)}, rows, barrier, row_operand,
                       batch, step.head, step.row0);
      load_tile_panels(Tile{smem.root, static_cast<uint32_t>(at + Tile::kBytes)}, cols, barrier,
                       col_operand, batch, step.head / group, step.col0);
      ring.advance();
    };
    if (!leader) return;
    await_stage();
    smem.steps[ring.stage] = step;
    load(maps.query, params.query, maps.key, params.key);
    await_stage();
    load(maps.dout, params.dout, maps.value, params.value);
  });
  if (!leader) return;
  await_stage();
  smem.steps[ring.stage].row0 = -1;
  ptx::mbarrier_arrive(smem.full + ring.stage * 8);
  ring.advance();
}

// A warp's 16 rows of the tile in shared memory: the bias, then dbias. They have the operands' type
// if bias and dbias do, else they are float32. The 16-byte chunks of a row are exchanged so that
// neither rows nor fragments make threads access the same banks.
template <typename Config, typename Element>
struct BiasRows {
  static constexpr int kN = Config::kBlock / 8, kRows = 16;
  static constexpr DType kDType =
      std::is_same_v<Element, __nv_bfloat16> ? DType::kBFloat16 : DType::kFloat16;

  uint32_t address;
  bool rounded;

  // `root`: where the rows of all warps begin. Called by the consumers' threads.
  __device__ __forceinline__ BiasRows(uint32_t root, bool is_rounded)
      : address(root +
                (threadIdx.x / 32 - 4) * Config::bias_bytes(is_rounded) / (4 * Config::kConsumers)),
        rounded(is_rounded) {}

  static __host__ __device__ __forceinline__ bool is_rounded(const Backward& params) {
    return params.bias.dtype == kDType && params.dbias.dtype == kDType;
  }

  // Reads the bias of rows row0... and columns col0..., of one batch and head.
  __device__ __forceinline__ void load(const Operand& bias, int64_t offset, int32_t row0,
                                       int32_t col0, const Extent& extent) const {
    __syncwarp();
    const int64_t first = offset + row0 * bias.row + col0 * bias.col;
    if (__all_sync(0xffffffff, has_chunks(bias, first) &&
                                   extent.contains(row0 + kRows, col0 + Config::kBlock))) {
      constexpr int kTogether = 8;
      for (int i = threadIdx.x % 32; i < chunks(); i += 32 * kTogether) {
        uint4 values[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          values[j] = __ldg(chunk_of(bias, first, row(i + 32 * j), chunk(i + 32 * j)));
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          ptx::st_shared_v4(chunk_address(row(i + 32 * j), chunk(i + 32 * j)), values[j]);
        }
      }
    } else {
      for_elements([&](int r, int c, uint32_t at) {
        const int64_t from = min(row0 + r, extent.rows - 1) * bias.row;
        set(at, load_float(bias, offset + from + min(col0 + c, extent.cols - 1) * bias.col));
      });
    }
    __syncwarp();
  }
  // Multiplies products by `scale` and adds the bias.
  __device__ __forceinline__ void add_to(float (&scores)[kN][4], float scale) const {
    const int lane = threadIdx.x % 32;
    if (rounded) {
      const uint32_t base = chunk_address(lane % 16, lane / 16);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t pairs[4];
        ptx::ldmatrix_x4(pairs, base ^ (n * 16));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Element pair[2];
          memcpy(pair, &pairs[i], 4);
          float* const both = &scores[n + i / 2][i % 2 * 2];
          both[0] = fmaf(both[0], scale, to_float(pair[0]));
          both[1] = fmaf(both[1], scale, to_float(pair[1]));
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t base = fragment_address(half);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 pair = ptx::ld_shared_v2_f32(base ^ (n * 32));
          scores[n][2 * half] = fmaf(scores[n][2 * half], scale, pair.x);
          scores[n][2 * half + 1] = fmaf(scores[n][2 * half + 1], scale, pair.y);
        }
      }
    }
  }
  // Puts dbias in the place of the bias.
  __device__ __forceinline__ void put(const float (&sums)[kN][4]) const {
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t base = fragment_address(half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float x = sums[n][2 * half], y = sums[n][2 * half + 1];
        if (rounded) {
          ptx::st_shared_b32(base ^ (n * 16), ptx::cvt_rn_x2<Element>(x, y));
        } else {
          ptx::st_shared_v2(base ^ (n * 32), make_uint2(__float_as_uint(x), __float_as_uint(y)));
        }
      }
    }
    __syncwarp();
  }
  // Writes it to rows row0... and columns col0... that exist, of one batch and head.
  __device__ __forceinline__ void store(const Operand& dbias, int64_t offset, int32_t row0,
                                        int32_t col0, const Extent& extent) const {
    const int64_t first = offset + row0 * dbias.row + col0 * dbias.col;
    if (__all_sync(0xffffffff, has_chunks(dbias, first) && extent.cols % chunk_elements() == 0)) {
#pragma unroll 4
      for (int i = threadIdx.x % 32; i < chunks(); i += 32) {
        if (row0 + row(i) >= extent.rows || col0 + chunk(i) * chunk_elements() >= extent.cols) {
          continue;
        }
        *chunk_of(dbias, first, row(i), chunk(i)) =
            ptx::ld_shared_v4(chunk_address(row(i), chunk(i)));
      }
    } else {
      for_elements([&](int r, int c, uint32_t at) {
        if (row0 + r >= extent.rows || col0 + c >= extent.cols) return;
        store_float(dbias, first + r * dbias.row + c * dbias.col, get(at));
      });
    }
  }

 private:
  __device__ __forceinline__ int element_bytes() const { return rounded ? 2 : 4; }
  __device__ __forceinline__ int chunk_elements() const { return rounded ? 8 : 4; }
  __device__ __forceinline__ int row_chunks() const { return rounded ? kN : 2 * kN; }
  __device__ __forceinline__ int chunks() const { return kRows * row_chunks(); }
  // The i-th chunk's row, and place in that.
  __device__ __forceinline__ int row(int i) const { return i / kN >> !rounded; }
  __device__ __forceinline__ int chunk(int i) const { return i % row_chunks(); }

  // A row of an even number of chunks, and the other one of its pair, exchange pairs of chunks.
  __device__ __forceinline__ uint32_t chunk_address(int r, int index) const {
    return address + (r * row_chunks() + (index ^ (r % 8 << !rounded))) * 16;
  }
  // The address of this thread's first pair of elements in the upper or lower 8 rows.
  __device__ __forceinline__ uint32_t fragment_address(int half) const {
    const int lane = threadIdx.x % 32, byte = lane % 4 * 2 * element_bytes();
    return chunk_address(lane / 4 + 8 * half, byte / 16) + byte % 16;
  }
  // Returns whether rows are whole chunks in memory. `first`: the index of some chunk.
  __device__ __forceinline__ bool has_chunks(const Operand& operand, int64_t first) const {
    return operand.dtype == (rounded ? kDType : DType::kFloat32) && operand.col == 1 &&
           operand.row % chunk_elements() == 0 &&
           reinterpret_cast<uintptr_t>(element(operand, first)) % 16 == 0;
  }
  __device__ __forceinline__ char* element(const Operand& operand, int64_t index) const {
    return static_cast<char*>(operand.data) + index * element_bytes();
  }
  __device__ __forceinline__ uint4* chunk_of(const Operand& operand, int64_t first, int r,
                                             int index) const {
    return reinterpret_cast<uint4*>(
        element(operand, first + r * operand.row + index * chunk_elements()));
  }
  // Calls body(row, column, address) for a share of the elements.
  template <typename Body>
  __device__ __forceinline__ void for_elements(const Body& body) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kRows * Config::kBlock; i += 32) {
      const int r = i / Config::kBlock, c = i % Config::kBlock, byte = c * element_bytes();
      body(r, c, chunk_address(r, byte / 16) + byte % 16);
    }
  }
  __device__ __forceinline__ void set(uint32_t at, float value) const {
    if (!rounded) {
      in_shared<float>(at) = value;
      return;
    }
    const uint32_t pair = ptx::cvt_rn_x2<Element>(value, value);
    memcpy(&in_shared<Element>(at), &pair, 2);
  }
  __device__ __forceinline__ float get(uint32_t at) const {
    return rounded ? to_float(in_shared<Element>(at)) : in_shared<float>(at);
  }
  template <typename Value>
  static __device__ __forceinline__ Value& in_shared(uint32_t at) {
    return *static_cast<Value*>(__cvta_shared_to_generic(at));
  }
};

// Sums dbias of a consumer's 64 queries and 128 keys over the steps of one tile after the other.
// kModifiers: kBias if there is no other.
template <typename Config, typename Element, uint32_t kModifiers>
struct BiasConsumer {
  static constexpr int kN = Config::kBlock / 8;
  static constexpr bool kOnly = kModifiers == kBias;
  using Tile = typename Config::Tile;
  using Sums = float[1][kN][4];

  const Backward& params;
  const BackwardWorkspace& workspace;
  const BiasRing& smem;
  const BiasRows<Config, Element>& rows;
  const int group;  // 0 or 1

  // Sums one tile, whose first row of this warp is row0.
  __device__ __forceinline__ void run(Sums& total, const BiasSteps& tile, int32_t row0,
                                      PairRing& ring) const {
    clear(total[0]);
    for (bool first = true;; first = false) {
      ptx::mbarrier_wait(smem.full + ring.stage * 8, ring.parity);
      const BiasStep step = smem.steps[ring.stage];
      if (__reduce_max_sync(0xffffffff, step.row0) < 0) break;
      if (kOnly && first) load_bias(tile, row0);
      add_step(total, step, ring);
    }
    arrive_by_warp(smem.empty + ring.stage * 8);
    ring.advance();
  }

 private:
  __device__ __forceinline__ void load_bias(const BiasSteps& tile, int32_t row0) const {
    const Operand& bias = params.bias;
    const BatchIndex batch(params.shape, tile.first_batch());
    rows.load(bias, batch.offset(bias) + tile.own_head * bias.head, row0,
              tile.own_col * Config::kBlock, {params.shape.q_len, params.shape.kv_len});
  }
  __device__ __forceinline__ void add_step(Sums& total, const BiasStep& step,
                                           PairRing& ring) const {
    Sums scores, dscores;
    start(scores[0], ring.stage);
    const int32_t row0 = step.row0 + group * 64 + threadIdx.x % 128 / 32 * 16;
    float lse[1][2], delta[1][2];
    read_statistics(step, row0, lse[0], delta[0]);
    const uint32_t first = ring.stage;
    ring.advance();
    // Other modifiers need the registers of dP.
    if constexpr (kOnly) start_second(dscores[0], ring);
    ptx::wgmma_wait_group<kOnly>();
    ptx::wgmma_results(scores[0]);
    arrive_by_warp(smem.empty + first * 8);
    const BatchIndex batch = kOnly ? BatchIndex() : BatchIndex(params.shape, step.batch_index);
    const ScoreGradient<true, 1, kN, Element> gradient(params, batch, step.head, row0, step.col0);
    if constexpr (kOnly) {
      rows.add_to(scores[0], params.options.scale);
      const bool all_allowed =
          row0 + 16 <= step.band.q_len &&
          step.band.all_allowed(row0, row0 + 16, step.col0, step.col0 + Config::kBlock);
      if (!__all_sync(0xffffffff, all_allowed)) mask_rows(scores, step, row0);
    } else {
      modify_tile<kModifiers>(scores, params, batch, step.head, step.band, row0, step.col0);
    }
    gradient.probabilities(scores[0], lse[0], 1.0f, 0, 0, kN);
    if constexpr (!kOnly) start_second(dscores[0], ring);
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_results(dscores[0]);
    arrive_by_warp(smem.empty + ring.stage * 8);
    ring.advance();
    if constexpr (!kOnly) gradient.finish(scores, dscores, lse, delta);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = total[0][n][e];
        if constexpr (kOnly) {
          // An element that is not allowed has P = 0 whatever dP is.
          const float p = scores[0][n][e], added = fmaf(p, dscores[0][n][e] - delta[0][e / 2], sum);
          sum = p == 0.0f ? sum : added;
        } else {
          sum += dscores[0][n][e];
        }
      }
    }
  }

  // Sets what the band does not allow, and rows past the end, to -inf.
  static __device__ __forceinline__ void mask_rows(Sums& scores, const BiasStep& step,
                                                   int32_t row0) {
    mask_band(scores, step.band, row0, step.col0);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (row0 + fragment_row(0, e) >= step.band.q_len) scores[0][n][e] = minus_infinity();
      }
    }
  }
  __device__ __forceinline__ void read_statistics(const BiasStep& step, int32_t row0,
                                                  float (&lse)[2], float (&delta)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t index = workspace.row_index(step.batch_index * params.shape.heads + step.head,
                                                row0 + fragment_row(0, 2 * half));
      lse[half] = workspace.lse_log2[index];
      delta[half] = workspace.delta[index];
    }
  }
  __device__ __forceinline__ void start_second(float (&products)[kN][4],
                                               const PairRing& ring) const {
    ptx::mbarrier_wait(smem.full + ring.stage * 8, ring.parity);
    start(products, ring.stage);
  }
  // Starts to multiply a stage's pair of tiles.
  __device__ __forceinline__ void start(float (&products)[kN][4], uint32_t stage) const {
    const uint32_t at = stage * Config::kPairBytes;
    const Tile queries{smem.root, at}, keys{smem.root, at + Tile::kBytes};
    forget(products);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Config::kHeadDim / 16; ++k) {
      ptx::Wgmma<Element, Config::kBlock>::template ss<0, 0>(
          products, descriptor_k_major(queries, group * 64, k), descriptor_k_major(keys, 0, k),
          k > 0);
    }
    ptx::wgmma_commit_group();
  }
};

// Sums over a tile's rows in a fixed order, by both consumers. All rows then hold the sum.
template <typename Config, int kN>
__device__ __forceinline__ void sum_bias_rows(float (&total)[kN][4], float* partial_smem) {
  constexpr int kWarps = 4 * Config::kConsumers;
  const int warp = threadIdx.x / 32 - 4;
  ptx::barrier_sync(kConsumers, Config::kConsumerThreads);  // nobody needs the bias any more
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

// Writes a warp's part of a tile of dbias, whose first row is row0.
template <typename Config, typename Element>
__device__ __forceinline__ void store_bias_gradient(const BiasSteps& tile,
                                                    float (&total)[1][Config::kBlock / 8][4],
                                                    const BiasRows<Config, Element>& rows,
                                                    int32_t row0, float* partial_smem) {
  const Shape& shape = tile.params.shape;
  const Operand& dbias = tile.params.dbias;
  if (dbias.row == 0) sum_bias_rows<Config>(total[0], partial_smem);
  if (dbias.col == 0) sum_cols(total);
  rows.put(total[0]);
  const BatchIndex batch(shape, tile.first_batch());
  rows.store(dbias, batch.offset(dbias) + tile.own_head * dbias.head, row0,
             tile.own_col * Config::kBlock,
             {dbias.row ? shape.q_len : 1, dbias.col ? shape.kv_len : 1});
}

template <typename Config, typename Element, uint32_t kModifiers>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_bias_gradient_kernel(const __grid_constant__ Backward params,
                              const __grid_constant__ BackwardMaps maps,
                              const BackwardWorkspace workspace,
                              const __grid_constant__ BiasOwnership ownership) {
  using Rows = BiasRows<Config, Element>;
  extern __shared__ __align__(1024) uint8_t tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[2 * Config::kMostStages];
  __shared__ BiasStep steps_smem[Config::kMostStages];
  const uint32_t barriers = ptx::shared_address(barriers_smem);
  const BiasRing smem{ptx::shared_address(tiles_smem), barriers, barriers + 8 * Config::kMostStages,
                      steps_smem};
  const bool rounded = Rows::is_rounded(params);
  PairRing ring{static_cast<uint32_t>(Config::stages(rounded))};
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < ring.stages; ++stage) {
      ptx::mbarrier_init(smem.full + stage * 8, 1);
      ptx::mbarrier_init(smem.empty + stage * 8, Config::kConsumers * 4 * kWarpArrivals);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const auto tiles = static_cast<uint32_t>(ownership.blocks());
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<Config::kProducerRegisters>();
    if (threadIdx.x >= 32) return;
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      load_pairs<Config>(BiasSteps(params, workspace, ownership, tile), maps, smem, ring);
    }
  } else {
    ptx::setmaxnreg_inc<Config::kConsumerRegisters>();
    const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0) - 1;
    const Rows rows(smem.root + ring.stages * Config::kPairBytes, rounded);
    const BiasConsumer<Config, Element, kModifiers> consumer{params, workspace, smem, rows, group};
    float* const partial_smem =
        reinterpret_cast<float*>(tiles_smem + ring.stages * Config::kPairBytes);
    float total[1][Config::kBlock / 8][4];
    for (uint32_t index = blockIdx.x; index < tiles; index += gridDim.x) {
      const BiasSteps tile(params, workspace, ownership, index);
      const int32_t row0 = tile.own_row * Config::kBlock + (threadIdx.x / 32 - 4) * 16;
      consumer.run(total, tile, row0, ring);
      store_bias_gradient<Config, Element>(tile, total, rows, row0, partial_smem);
    }
  }
}

// Launches it if dbias has enough tiles for all multiprocessors; else returns false in `launched`.
template <typename Element, int kHeadDim>
Status launch_wide_bias_gradient(const Backward& params, const BackwardWorkspace& workspace,
                                 cudaStream_t stream, bool& launched) {
  using Config = BiasGradientConfig<kHeadDim>;
  launched = false;
  if (!params.dbias) return {};
  const BiasOwnership ownership(params.shape, params.dbias, Config::kBlock);
  int sms = 0;
  Status status = multiprocessors(sms);
  if (!status.ok() || ownership.blocks() < sms) return status;
  BackwardMaps maps;
  status = make_backward_maps(params, Config::kBlock, Config::kBlock, maps);
  if (!status.ok()) return status;
  launched = true;
  const bool rounded = BiasRows<Config, Element>::is_rounded(params);
  const auto launch = [&](auto* kernel) {
    return launch_kernel("sm90::wide_bias_gradient_kernel", params.shape, kernel, sms,
                         Config::kThreads, Config::smem_bytes(rounded), stream, params, maps,
                         workspace, ownership);
  };
  return modifiers_of(params) == kBias
             ? launch(wide_bias_gradient_kernel<Config, Element, kBias>)
             : launch(wide_bias_gradient_kernel<Config, Element, kEveryModifier>);
}

}  // namespace jax_flash::sm90
