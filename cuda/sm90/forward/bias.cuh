// Adds a bias in the sm_90 forward kernels for a bias alone. Its tiles are copied to shared memory
// a tile ahead: 2-byte elements by TMA, in boxes (BiasBox), 4-byte elements by consumers' cp.async
// (BiasTile). They are added before or while the exponentials are computed, or are the
// accumulators' first values (kInScores).
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "status.h"
#include "tile/softmax.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Describes a consumer's 64 rows of a tile of a bias of 2-byte elements, which the copy engine
// brings in panels whose rows are as wide as the swizzle. There is one stage, with a full and an
// empty barrier.
template <int kBlockKv>
struct BiasBox {
  static constexpr int kCols = kBlockKv % 32 == 0 && kBlockKv % 64 != 0 ? 32 : 64;  // per panel
  static constexpr int kRowBytes = kCols * 2, kPanelBytes = 64 * kRowBytes;
  static constexpr int kPanels = (kBlockKv + kCols - 1) / kCols;

  uint32_t reader;  // address of this lane's row of the first matrices for ldmatrix
  uint32_t full, empty, parity;

  // A bias that is the same for all rows has one row only. kKeepsReader: keeps `reader` in a
  // register.
  template <bool kKeepsReader>
  __device__ __forceinline__ void init(uint32_t smem, uint32_t full_barrier, uint32_t empty_barrier,
                                       bool one_row) {
    full = full_barrier;
    empty = empty_barrier;
    parity = 0;
    const int lane = threadIdx.x % 32;
    const int row = one_row ? 0 : threadIdx.x % kWarpgroup / 32 * 16 + lane % 16;
    const int swizzle = kCols == 64 ? row % 8 : row / 2 % 4;
    reader = smem + row * kRowBytes + (lane / 16 ^ swizzle) * 16;
    // The shuffle keeps the assembler from computing `reader` again for each tile.
    if constexpr (kKeepsReader) reader = __shfl_sync(0xffffffff, reader, lane);
  }
  __device__ __forceinline__ void wait() {
    ptx::mbarrier_wait(full, parity);
    parity ^= 1;
  }
  // Loads blocks n, which is even, and n + 1 of the warp's fragment: rows g and g + 8 of block n,
  // then of block n + 1. The last blocks must be loaded last, since unpack() then releases the
  // stage.
  __device__ __forceinline__ void load(uint32_t (&words)[4], int n) const {
    constexpr int kPairs = kCols / 16;  // pairs of blocks in a panel
    ptx::ldmatrix_x4(words, (reader ^ n / 2 % kPairs * 32) + n / 2 / kPairs * kPanelBytes);
  }
  template <typename T>
  __device__ __forceinline__ void unpack(const uint32_t (&words)[4], float (&blocks)[2][4],
                                         int n) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 pair;
      if constexpr (std::is_same_v<T, __half>) {
        pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      } else {
        pair = {__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000)};
      }
      blocks[i / 2][i % 2 * 2] = pair.x;
      blocks[i / 2][i % 2 * 2 + 1] = pair.y;
    }
    if (n + 2 < kBlockKv / 8) return;
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
  }
  template <typename T>
  __device__ __forceinline__ void read(float (&blocks)[2][4], int n) const {
    uint32_t words[4];
    load(words, n);
    unpack<T>(words, blocks, n);
  }
};

// Describes a warp's 16 rows of a tile of a bias of 4-byte elements, which the warp copies itself,
// in groups of 32 columns. In each row of a group, the 32 bytes of the fragment's block n are at
// place n ^ row % 4, which avoids bank conflicts.
template <int kN>
struct BiasTile {
  static constexpr int kLanes = 8;  // lanes per row of a group
  uint32_t written, read_from;  // addresses of this thread's first vector and of its first block

  __device__ __forceinline__ void init(uint32_t smem) {
    const int lane = threadIdx.x % 32, row = lane / kLanes, chunk = lane % kLanes;
    written = smem + row * 128 + (chunk / 2 ^ row % 4) * 32 + chunk % 2 * 16;
    read_from = smem + lane / 4 * 128 + lane / 4 % 4 * 32 + lane % 4 * 8;
  }

  // Holds the offsets of a thread's vectors in a tile's rows, in vectors of 16 bytes. Computed once
  // per query tile. Rows beyond the last are replaced by the last.
  struct Rows {
    uint32_t at[kLanes / 2];
  };
  static __device__ __forceinline__ Rows rows(int64_t row_stride, int32_t row0, int32_t count) {
    const int lane = threadIdx.x % 32;
    Rows rows = {};
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {
      const int64_t row = min(row0 + lane / kLanes + i * (32 / kLanes), count - 1);
      rows.at[i] = static_cast<uint32_t>(row * row_stride / 4) + lane % kLanes;
    }
    return rows;
  }

  // Starts copies. `bias` points to row 0 of the batch and head, and to the tile's first column,
  // which `cols` columns follow. The previous contents must have been read.
  __device__ __forceinline__ void copy(const float* bias, const Rows& rows, int32_t cols) const {
    static_assert(kN % 4 == 0);
    const int chunk = threadIdx.x % kLanes;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kLanes / 2; ++i) {
      const float* from = bias + uint64_t{rows.at[i]} * 4;
#pragma unroll
      for (int group = 0; group < kN / 4; ++group) {
        ptx::cp_async_16(written + group * (16 * kLanes * 16) + i * 512, from + group * kLanes * 4,
                         group * 32 + chunk * 4 < cols);
      }
    }
    ptx::cp_async_commit_group();
  }

  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait_group<0>();
    __syncwarp();
  }

  // Reads blocks n, which is even, and n + 1 of the warp's fragment.
  template <typename T>
  __device__ __forceinline__ void read(float (&blocks)[2][4], int n) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = (read_from ^ (n + i / 2) % 4 * 32) + n / 4 * 2048 + i % 2 * 1024;
      float (&block)[4] = blocks[i / 2];
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(block[i % 2 * 2]), "=f"(block[i % 2 * 2 + 1])
                   : "r"(at));
    }
  }
};

// Adds the bias to the maps of the other operands.
struct BoxedMaps : ForwardMaps {
  CUtensorMap boxes;
  BoxAxes box_axes;
};
template <typename Config>
using MapsOf = std::conditional_t<Config::kBiasBoxes, BoxedMaps, ForwardMaps>;

// Makes the map of a bias that can be read in boxes (ModifierPlan).
template <typename Config>
Status make_bias_map(const Forward& params, BoxedMaps& maps) {
  const Shape& shape = params.shape;
  maps.box_axes = BoxAxes(params.bias);
  return make_tensor_map("bias", shape, params.bias, shape.q_len, shape.heads, shape.kv_len,
                         params.bias.row == 0 ? 1 : 64, maps.boxes, 1,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, BiasBox<Config::kBlockKv>::kCols);
}

// Starts copies of a consumer's rows, which begin with row0, for the keys of tiles [tile, end),
// each as soon as the previous one has been read. Called by one thread.
template <typename Config, typename Smem>
__device__ __forceinline__ void load_bias(const Smem& smem, const BoxedMaps& maps, int group,
                                          const QueryTileIndex& q, int32_t row0, int32_t tile,
                                          int32_t end, uint32_t& parity) {
  using Box = BiasBox<Config::kBlockKv>;
  const uint32_t bytes = Box::kPanels * Box::kRowBytes * (maps.box_axes.row ? 64 : 1);
  for (; tile < end; ++tile) {
    ptx::mbarrier_wait_asleep(smem.bias_empty(group), parity ^ 1);
    ptx::fence_proxy_async_shared();  // in consumers, it would cost time in every tile
    ptx::mbarrier_arrive_expect_tx(smem.bias_full(group), bytes);
#pragma unroll
    for (int panel = 0; panel < Box::kPanels; ++panel) {
      load_box(smem.own(group * 4) + panel * Box::kPanelBytes, maps.boxes, smem.bias_full(group),
               maps.box_axes, q.batch_axes, q.head, row0,
               tile * Config::kBlockKv + panel * Box::kCols);
    }
    parity ^= 1;
  }
}

// Adds a bias that can be read in vectors or boxes, a tile ahead.
template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kBias> : ModifierDefaults<Config, Element, kBias> {
  using Base = ModifierDefaults<Config, Element, kBias>;
  using Base::kN;
  using typename Base::Scores;
  static constexpr When kOptimistic = When::kWithHalfValues, kExactMaxima = When::kUnlessOptimistic;
  static constexpr bool kReadsQueryAgain = true, kAddends = true;
  // True for a bias that is read ahead in boxes: its 2-byte elements have the operands' type.
  static constexpr bool kBoxes = Config::kBiasBoxes;
  static constexpr bool kInScores = kBoxes && Config::kBiasInScores, kWaitsAhead = kInScores;
  using BiasType = std::conditional_t<kBoxes, Element, float>;
  static constexpr int kEarlyLoads = 2;

  const Forward& params;
  const ForwardPlan& plan;
  std::conditional_t<kBoxes, BiasBox<Config::kBlockKv>, BiasTile<kN>> bias;
  uint32_t first_words[kEarlyLoads][4];
  typename BiasTile<kN>::Rows bias_rows;

  __device__ __forceinline__ ForwardModifier(const Forward& forward, const ForwardPlan& planned,
                                             const ForwardSmem<Config>& smem, int group)
      : params(forward), plan(planned) {
    if constexpr (kBoxes) {
      bias.template init<kInScores>(smem.own(group * 4), smem.bias_full(group),
                                    smem.bias_empty(group), params.bias.row == 0);
    } else {
      bias.init(smem.own(threadIdx.x / 32 - 4));
    }
  }

  __device__ __forceinline__ float least_logit() const { return kLeastLogit; }
  __device__ __forceinline__ void begin(const QueryWork&, int32_t row0) {
    if constexpr (!kBoxes) bias_rows = BiasTile<kN>::rows(params.bias.row, row0, plan.q_len);
  }
  // Does nothing for boxes, which a producer copies.
  __device__ __forceinline__ void read_ahead(const QueryWork& work, int32_t tile) {
    if constexpr (!kBoxes) {
      if (tile < 0) return;
      const int32_t col0 = tile * Config::kBlockKv;
      const auto* data = static_cast<const float*>(params.bias.data);
      bias.copy(data + work.modifiers.bias + col0, bias_rows, plan.kv_len - col0);
    }
  }
  __device__ __forceinline__ void prepare(const QueryWork&, int32_t, int32_t, bool) {
    if constexpr (!kInScores) bias.wait();
  }
  __device__ __forceinline__ void modify(Scores& scores, const Forward& params,
                                         const ModifierOffsets& offsets, const Band& band,
                                         int32_t row0, int32_t col0, bool, bool again) const {
    if (again) {
      add_elements(scores[0], static_cast<const BiasType*>(params.bias.data) + offsets.bias,
                   params.bias.row, params.options.scale, row0, col0, {band.q_len, band.kv_len});
    } else if constexpr (!kInScores) {
      add_bias(scores);
    }
  }
  // Each case has its own code. The code for most tiles is one basic block, in which the assembler
  // interleaves the exponentials with the instructions before and after them. The scores are
  // started before the case is determined, so that they need not wait for it.
  template <typename Consumer>
  static __device__ __forceinline__ void next_tile(Consumer& consumer, int32_t last, int32_t tile) {
    consumer.wait_key();
    consumer.start_scores();
    if constexpr (Consumer::kOptimistic) {
      if (!consumer.is_careful(tile) && !consumer.at_edge(tile)) {
        consumer.template next_tile<TileKind::kInner>(last, tile);
        return;
      }
    }
    consumer.next_tile(last, tile);
  }
  template <typename Consumer>
  static __device__ __forceinline__ void attend_rest(Consumer& consumer, int32_t& tile) {
    if constexpr (kInScores) {
      Base::attend_rest(consumer, tile);
    } else {
      for (; !consumer.is_last(tile); ++tile) next_tile(consumer, tile, tile + 1);
    }
  }
  // Sets the accumulators to the bias, to which products are then added.
  __device__ __forceinline__ void begin_scores(Scores& scores) {
    bias.wait();
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      bias.template read<BiasType>(reinterpret_cast<float (&)[2][4]>(scores[0][n]), n);
    }
  }
  // Adds the bias that was read ahead.
  __device__ __forceinline__ void add_bias(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float addends[2][4];
      bias.template read<BiasType>(addends, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[0][n + e / 4][e % 4];
        score = fmaf(score, params.options.scale, addends[e / 4][e % 4]);
      }
    }
  }
  // Waits for a tile's bias, and starts the loads that inner_exponentials() needs first, so that
  // their latency overlaps the scores. More loads than these take longer than they save.
  __device__ __forceinline__ void prepare_inner() {
    bias.wait();
    if constexpr (kBoxes) {
#pragma unroll
      for (int i = 0; i < kEarlyLoads; ++i) bias.load(first_words[i], 2 * i);
    }
  }
  __device__ __forceinline__ void read_bias(float (&addends)[2][4], int n) const {
    if constexpr (kBoxes) {
      if (n < 2 * kEarlyLoads) {
        return bias.template unpack<BiasType>(first_words[n / 2], addends, n);
      }
    }
    bias.template read<BiasType>(addends, n);
  }
  // Computes exponentials of products with the bias added. Every row has a running maximum; the
  // exponential of a logit equal to it is 2^kLift.
  template <int kLift>
  __device__ __forceinline__ void inner_exponentials(Scores& scores,
                                                     OnlineSoftmax<1>& softmax) const {
    const float factor = plan.products_to_log2;  // if computed here, it would occupy a register
    float shift[2];
    find_shift<false, kLift>(softmax, kLog2E, shift);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      float addends[2][4];
      read_bias(addends, n);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& score = scores[0][n + e / 4][e % 4];
        const float offset = fmaf(addends[e / 4][e % 4], kLog2E, -shift[e % 4 / 2]);
        score = ptx::ex2_approx_ftz(fmaf(score, factor, offset));
        softmax.sum[0][e % 4 / 2] += score;
      }
    }
  }
};

}  // namespace jax_flash::sm90
