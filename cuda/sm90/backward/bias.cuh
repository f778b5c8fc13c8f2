// Adds a bias in the kernels of sm90/backward/narrow.cuh that are compiled for one. The producer
// copies it for 64 query rows and the keys of the block, in panels of 64 rows of 128 bytes (TMA).
// Consumers read it in the order of the fragments of S^T. Reads from global memory would wait for
// L2 between S^T and its exponentials, and would touch eight rows of 16 bytes each.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/backward/blocks.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/backward/smem.cuh"
#include "sm90/ring.cuh"
#include "status.h"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

inline constexpr int kBiasPanelBytes = 64 * 128;

// Adds the bias to the maps of the other operands.
struct BiasedBackwardMaps : BackwardMaps {
  CUtensorMap bias;
  BoxAxes bias_axes;
};
template <typename Config>
using BackwardMapsOf = std::conditional_t<Config::kHasBias, BiasedBackwardMaps, BackwardMaps>;

// A bias that is the same for all rows has boxes of one row. To the copy engine, a float32 bias has
// twice as many 16-bit elements.
inline Status make_bias_map(const Forward& params, BiasedBackwardMaps& maps) {
  const Shape& shape = params.shape;
  Operand bias = params.bias;
  int64_t cols = shape.kv_len;
  if (bias.dtype == DType::kFloat32) {
    bias.dtype = DType::kFloat16;
    for (int64_t* size : {&bias.row, &bias.head, &bias.batch[0], &bias.batch[1], &cols}) *size *= 2;
  }
  maps.bias_axes = BoxAxes(bias);
  return make_tensor_map("bias", shape, bias, shape.q_len, shape.heads, cols,
                         bias.row == 0 ? 1 : 64, maps.bias);
}

// Returns the stage of 64 query rows of a bias, and the parity of its barriers. `stage` and
// `parity` are those of the query tile in a ring of two. A tile of 128 rows has two halves.
template <typename Config>
__device__ __forceinline__ uint2 bias_stage(uint32_t stage, uint32_t parity, int half) {
  if constexpr (Config::kBlockQ == 128) {
    return Config::kBiasStages == 1 ? make_uint2(0, half) : make_uint2(half, stage);
  } else {
    return Config::kBiasStages == 1 ? make_uint2(0, stage) : make_uint2(stage, parity);
  }
}

// Starts the copies for a query tile from row0 on and a block of keys from key0 on. Called by one
// thread.
template <typename Config>
__device__ __forceinline__ void load_bias(const BiasedBackwardMaps& maps,
                                          const BackwardSmem<Config>& smem,
                                          const BackwardBlock& block, int32_t head, int32_t row0,
                                          int32_t key0, const StagePair& tile) {
  constexpr int kPanels = Config::kBiasStageBytes / kBiasPanelBytes;
  const int32_t batch[] = {static_cast<int32_t>(block.batch.coordinate[0]),
                           static_cast<int32_t>(block.batch.coordinate[1])};
  const uint32_t bytes = Config::kBiasStageBytes / (maps.bias_axes.row ? 1 : 64);
#pragma unroll
  for (int half = 0; half < Config::kBlockQ / 64; ++half) {
    const uint2 at = bias_stage<Config>(tile.stage(), tile.parity(), half);
    const uint32_t full = smem.bias_full(at.x);
    ptx::mbarrier_wait(smem.bias_empty(at.x), at.y ^ 1);
    ptx::fence_proxy_async_shared();
    ptx::mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      load_box(smem.bias(at.x) + panel * kBiasPanelBytes, maps.bias, full, maps.bias_axes, batch,
               head, row0 + half * 64, key0 * (Config::kBiasBytes / 2) + panel * 64);
    }
  }
}

// Handles the bias of a warp's fragment of S^T: 16 keys by 64 queries.
template <typename Config, typename Element>
struct TransposedBias {
  static constexpr bool kFloats = Config::kBiasBytes == 4;

  uint32_t words[4][4];   // of 16-bit elements, for each two blocks of 8 queries
  uint32_t reader, step;  // where this lane reads, and the distance to the next two blocks
  uint32_t empty;

  // Waits for the 64 rows of the ring's query tile. Reads 16-bit elements: a word has two queries.
  template <typename Consumer>
  __device__ __forceinline__ void read(const Consumer& consumer, const RingState<2>& ring,
                                       int half) {
    const uint2 at = bias_stage<Config>(ring.stage, ring.parity, half);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const bool one_row = consumer.params.bias.row == 0;
    // The panel of the warp's keys, their first 16 bytes in a row of it, and the lane's row.
    const int panel = kFloats ? consumer.group * 2 + warp / 2 : consumer.group;
    const int chunk = kFloats ? warp % 2 * 4 + lane / 16 : warp * 2 + lane / 8 % 2;
    const int row = one_row ? 0 : kFloats ? lane % 4 * 2 : lane / 16 * 8 + lane % 8;
    reader = consumer.smem.bias(at.x) + panel * kBiasPanelBytes + row * 128 +
             (chunk ^ row % 8) * 16 + (kFloats ? lane / 4 % 4 * 4 : 0);
    step = one_row ? 0 : 16 * 128;
    empty = consumer.smem.bias_empty(at.x);
    ptx::mbarrier_wait(consumer.smem.bias_full(at.x), at.y);
    if constexpr (!kFloats) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ptx::ldmatrix_x4_trans(words[i], reader + i * step);
      sync_and_arrive_warp(empty);
    }
  }
  // Multiplies products by the scale, and adds the bias. lse must not be subtracted from the bias
  // instead: where the bias is so great that a product is lost in the sum, it is lost forward, too.
  __device__ __forceinline__ void add_to(float (&scores)[8][4], float scale) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // blocks 2i and 2i + 1, keys g and g + 8 of each
        const float2 pair = pair_of_queries(i, j);
        float (&block)[4] = scores[2 * i + j / 2];
        block[j % 2 * 2] = fmaf(block[j % 2 * 2], scale, pair.x);
        block[j % 2 * 2 + 1] = fmaf(block[j % 2 * 2 + 1], scale, pair.y);
      }
    }
    if constexpr (kFloats) sync_and_arrive_warp(empty);
  }

 private:
  __device__ __forceinline__ float2 pair_of_queries(int i, int j) const {
    if constexpr (kFloats) {
      // Swizzling exchanges chunks of neighboring rows; keys g + 8 are two chunks further.
      const uint32_t first = (reader ^ j % 2 * 32) + i * step + (step / 2) * (j / 2);
      const uint32_t second = step == 0 ? first : (first ^ 16) + 128;
      float2 pair;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(pair.x) : "r"(first));
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(pair.y) : "r"(second));
      return pair;
    } else if constexpr (std::is_same_v<Element, __half>) {
      return __half22float2(reinterpret_cast<const __half2&>(words[i][j]));
    } else {
      return {__uint_as_float(words[i][j] << 16), __uint_as_float(words[i][j] & 0xffff0000)};
    }
  }
};
// Replaces it in kernels without a bias.
struct NoBias {
  template <typename Consumer>
  __device__ __forceinline__ void read(const Consumer&, const RingState<2>&, int) {}
};

}  // namespace jax_flash::sm90
