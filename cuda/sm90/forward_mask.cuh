// Masks in the sm_90 forward kernel whose bits the warps that copy Q make of boxes of bytes.
#pragma once

#include <cstdint>

#include "params.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/config.cuh"
#include "sm90/forward_bias.cuh"
#include "sm90/forward_modified.cuh"
#include "sm90/schedule.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash::sm90 {

// Bytes are copied in pairs, as 16-bit elements, in boxes of 32 rows and a tile's keys.
struct MaskBox {
  static constexpr int kRows = 32, kRowBytes = 128, kBytes = kRows * kRowBytes;
};

inline bool fits_mask_boxes(const Forward& params) {
  return has_vectors(params.mask, 1, 16) && params.shape.kv_len % 2 == 0 &&
         fits_tensor_map(params.shape, params.mask, 1);
}

inline Status make_mask_map(const Forward& params, BoxedMaps& maps) {
  const Shape& shape = params.shape;
  Operand pairs = params.mask;
  pairs.row /= 2;
  pairs.head /= 2;
  for (int64_t& stride : pairs.batch) stride /= 2;
  maps.box_axes = BoxAxes(pairs);
  return make_tensor_map("mask", shape, pairs, shape.q_len, shape.heads, shape.kv_len / 2,
                         pairs.row == 0 ? 1 : MaskBox::kRows, maps.boxes);
}

// The bits of a consumer's rows, which the warp that copies its Q makes; they arrive with K. It
// reads 16 rows at a time as matrices: a lane then has four bytes of every 16 columns of two rows.
// Of its words in AllowedBits half the bits are from each of two lanes of its quad.
struct MaskBits {
  uint32_t stage = 0, key_parity = 0, box_parity = 0;

  // For the keys of a query tile, and rows from row0 on.
  template <typename Config, typename Smem>
  __device__ __forceinline__ void make(const Smem& smem, const BoxedMaps& maps, int group,
                                       const QueryTileIndex& q, int32_t row0,
                                       const TileRange& range) {
    static_assert(Config::kBlockKv == MaskBox::kRowBytes);
    const int lane = threadIdx.x % 32;
    const bool leader = lane == 0, one_row = maps.box_axes.row == 0;
    const uint32_t boxes = smem.own(group * 4);
    const auto load = [&](int half, int32_t tile) {
      const uint32_t full = smem.mask_full(group, half);
      ptx::mbarrier_arrive_expect_tx(full, one_row ? MaskBox::kRowBytes : MaskBox::kBytes);
      load_box(boxes + half * MaskBox::kBytes, maps.boxes, full, maps.box_axes, q.batch_axes,
               q.head, row0 + half * MaskBox::kRows, tile * (Config::kBlockKv / 2));
    };
    if (range.first >= range.end) return;
    if (leader) {
      load(0, range.first);
      load(1, range.first);
    }
    const int row = one_row ? 0 : lane % 16;
    const uint32_t reader = boxes + row * MaskBox::kRowBytes + (lane / 16 ^ row % 8) * 16;
    const int source = lane % 4 / 2, shift = lane % 2 * 2;
    for (int32_t tile = range.first; tile < range.end; ++tile) {
      ptx::mbarrier_wait(smem.key_empty(stage), key_parity ^ 1);
      const uint32_t bits = smem.mask_bits(stage, group) + lane * 8;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        ptx::mbarrier_wait(smem.mask_full(group, half), box_parity);
        uint32_t words[4] = {};  // for two of the consumer's warps
#pragma unroll
        for (int pair = 3; pair >= 0; --pair) {
#pragma unroll
          for (int warp = 0; warp < 2; ++warp) {
            const uint32_t first =
                reader + half * MaskBox::kBytes + (one_row ? 0 : warp * 16 * MaskBox::kRowBytes);
            uint32_t bytes[4];
            ptx::ldmatrix_x4(bytes, first ^ pair * 32);
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // bytes are 0 or 1
              uint32_t& word = words[warp * 2 + i];
              word = __dp4a(bytes[i], 0x08040201u, __dp4a(bytes[i + 2], 0x80402010u, word << 8));
            }
          }
        }
        if (tile + 1 < range.end) {
          ptx::fence_proxy_async_shared();
          __syncwarp();
          if (leader) load(half, tile + 1);
        }
#pragma unroll
        for (uint32_t& word : words) {
          const uint32_t even = __shfl_sync(0xffffffff, word, source, 4);
          const uint32_t odd = __shfl_sync(0xffffffff, word, source + 2, 4);
          word = (even >> shift & 0x33333333) | (odd << (2 - shift) & 0xcccccccc);
        }
        ptx::st_shared_v2(bits + half * (64 * 8), {words[0], words[1]});
        ptx::st_shared_v2(bits + half * (64 * 8) + 32 * 8, {words[2], words[3]});
      }
      __syncwarp();
      if (leader) ptx::mbarrier_arrive(smem.key_full(stage));
      box_parity ^= 1;
      if (++stage == Config::kStages) {
        stage = 0;
        key_parity ^= 1;
      }
    }
  }
};

}  // namespace jax_flash::sm90
