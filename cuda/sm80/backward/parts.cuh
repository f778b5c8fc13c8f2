// Defines building blocks of the main backward kernel: the walk over query tiles, the turns of
// blocks that add to one sum, and the stores of accumulators to shared and global memory.
#pragma once

#include <cstdint>

#include "modifiers/segments.cuh"
#include "params.h"
#include "ptx/cp_async.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "sm80/backward/edges.cuh"
#include "tile/band.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

// Fixes the order in which several blocks add to a sum: block number `mine` waits until the counter
// shows its number, adds, and passes the turn on.
struct Turn {
  int32_t* counter;  // null: no turns
  int32_t mine;

  __device__ __forceinline__ void wait() const {
    if (counter == nullptr) return;
    if (threadIdx.x == 0) {
      while (ptx::ld_acquire(counter) != mine) __nanosleep(32);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void pass() const {
    if (counter == nullptr) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::st_release(counter, mine + 1);
  }
};

// Walks over the query tiles that a block visits, head by head, for all heads of a group. With
// segments, skips tiles.
struct QueryTileWalk {
  Range range;
  int32_t group;  // query heads per key/value head
  const SegmentSpan* query_spans = nullptr;
  int32_t query_blocks = 0;
  SegmentSpan key_span = {};
  int32_t head = 0, tile = 0;  // head == group: done

  template <int kBlockQ>
  __device__ __forceinline__ void skip() {
    if (query_spans) {
      tile = next_tile<kBlockQ>(query_spans, query_blocks, key_span, tile, range.end);
    }
    if (tile >= range.end) {
      ++head;
      tile = range.first;
      // Segments are the same for all heads: a first tile that was skipped is skipped again.
      if (query_spans && head < group) {
        tile = next_tile<kBlockQ>(query_spans, query_blocks, key_span, tile, range.end);
        if (tile >= range.end) head = group;
      }
    }
  }
  template <int kBlockQ>
  __device__ __forceinline__ void start() {
    tile = range.first;
    if (range.first >= range.end) {
      head = group;
    } else {
      skip<kBlockQ>();
    }
  }
  template <int kBlockQ>
  __device__ __forceinline__ void advance() {
    ++tile;
    skip<kBlockQ>();
  }
  __device__ __forceinline__ bool done() const { return head >= group; }
};

// Starts copying lse_log2 or delta of kCount rows of a head to shared memory.
template <int kCount>
__device__ __forceinline__ void load_statistics(float* smem, const float* statistics,
                                                const BackwardWorkspace& workspace,
                                                int64_t batch_head, int32_t row0) {
  if (threadIdx.x < kCount / 4) {
    const int32_t row = row0 + static_cast<int32_t>(threadIdx.x) * 4;
    ptx::cp_async_16(ptx::shared_address(smem + threadIdx.x * 4),
                     statistics + workspace.row_index(batch_head, row), true);
  }
}

// Reads lse or delta of the rows of this thread's fragments.
template <int kM>
__device__ __forceinline__ void load_rows(float (&values)[kM][2], const float* smem) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) values[m][half] = smem[fragment_row(m, 2 * half)];
  }
}

// Stores a block's dK or dV through shared memory. The warps take 16 columns at a time, in turn.
template <int kThreads, int kWarpCols, typename Element, typename Tile, int kM, int kN>
__device__ __forceinline__ void store_key_gradient(const Tile& tile, Element* gmem,
                                                   int64_t row_stride, int rows, int cols,
                                                   int warp_row, int warp_col, float scale,
                                                   float (&values)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int chunk = (n / 2 * kWarpCols + warp_col) * 2 + n % 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::st_shared_b32(
            tile.address(warp_row + fragment_row(m, 2 * half), chunk) + threadIdx.x % 4 * 4,
            ptx::cvt_rn_x2<Element>(values[m][n][2 * half] * scale,
                                    values[m][n][2 * half + 1] * scale));
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < Tile::kRows * (Tile::kCols / kChunk); i += kThreads) {
    const int row = i / (Tile::kCols / kChunk), chunk = i % (Tile::kCols / kChunk);
    if (row < rows && chunk * kChunk < cols) {
      *reinterpret_cast<uint4*>(gmem + row * row_stride + chunk * kChunk) =
          ptx::ld_shared_v4(tile.address(row, chunk));
    }
  }
}

// Adds a warp's part of dQ to the sums of a tile in the workspace.
template <typename Order, int kM, int kN>
__device__ __forceinline__ void add_dquery(float* tile_gmem, const Order& order,
                                           const float (&values)[kM][kN][4]) {
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int lane = order.tile_lane(warp, m, threadIdx.x % 32);
    const int col_blocks = lane < order.lanes ? order.col_blocks : 0;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      if (order.col_block(warp, n) >= col_blocks) continue;
      float* address = tile_gmem + order.offset(order.col_block(warp, n), lane);
#if __CUDA_ARCH__ >= 900
      ptx::red_add_v4_f32(address, values[m][n]);
#else
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ptx::red_add_f32(address + e * order.element_stride(), values[m][n][e]);
      }
#endif
    }
  }
}

// Adds a warp's part of dQ to the result itself, which holds the sums of float32 calls.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void add_float32_dquery(const Float32Rows& rows, int32_t row0,
                                                   int32_t row_end, int warp_col, float scale,
                                                   const float (&values)[kM][kN][4]) {
  constexpr int kWarpCols = Config::kWarps / Config::kQueryWarpRows;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = row0 + fragment_row(m, 2 * half);
      if (row >= row_end) continue;
      rows.for_columns<kWarpCols>(row, half, values[m], warp_col,
                                  [&](float* to, int32_t left, float4 value) {
                                    const float scaled[4] = {value.x * scale, value.y * scale,
                                                             value.z * scale, value.w * scale};
#if __CUDA_ARCH__ >= 900
                                    if (rows.aligned) return ptx::red_add_v4_f32(to, scaled);
#endif
#pragma unroll
                                    for (int e = 0; e < 4; ++e) {
                                      if (e < left) ptx::red_add_f32(to + e, scaled[e]);
                                    }
                                  });
    }
  }
}

// Stores dK or dV of float32. add_transpose_product() gives a thread neighbouring rows of them.
template <int kWarpCols, int kM, int kN>
__device__ __forceinline__ void store_float32_key_gradient(const Float32Rows& gradient, int row0,
                                                           int row_end, int warp_col, float scale,
                                                           const float (&values)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + m * 16 + threadIdx.x % 32 / 4 * 2 + half;
      if (row < row_end) gradient.store<kWarpCols>(row, half, values[m], warp_col, scale);
    }
  }
}

}  // namespace jax_flash::sm80
