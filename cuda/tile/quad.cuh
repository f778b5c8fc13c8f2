// Writes mma fragments to rows in global memory. The four lanes of a quad hold two columns each of
// the same blocks. They exchange them, so that each lane writes eight contiguous elements of one
// block.
#pragma once

#include <cstdint>

#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Transposes 4x4 words among the lanes of a quad: lane t's word n goes to lane n's word t.
__device__ __forceinline__ uint4 exchange_quad(const uint32_t (&word)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(0xffffffff, odd ? word[0] : word[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffff, odd ? word[2] : word[3], 1);
  const uint2 low_pair = odd ? uint2{a, word[1]} : uint2{word[0], a};
  const uint2 high_pair = odd ? uint2{b, word[3]} : uint2{word[2], b};
  const uint2 send = high ? low_pair : high_pair;
  const uint2 got = {__shfl_xor_sync(0xffffffff, send.x, 2),
                     __shfl_xor_sync(0xffffffff, send.y, 2)};
  return high ? uint4{got.x, got.y, high_pair.x, high_pair.y}
              : uint4{low_pair.x, low_pair.y, got.x, got.y};
}

// Writes a warp's 16 rows of fragments to a matrix. Rows are multiplied by `scale`, which has a
// factor for each half of the rows. `rows` and `cols` are the numbers of rows, counted from the
// warp's first, and of columns that exist. Called by whole warps. All rows are exchanged before the
// first is stored: the shuffles then overlap.
template <typename Element, int kN>
__device__ __forceinline__ void store_rows(Element* gmem, int64_t row_stride, int32_t rows,
                                           int32_t cols, const float (&scale)[2],
                                           const float (&values)[kN][4]) {
  constexpr int kChunks = (kN + 3) / 4;
  uint4 chunks[2][kChunks];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n0 = 0; n0 < kN; n0 += 4) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < 4 && n0 + i < kN; ++i) {
        words[i] = ptx::cvt_rn_x2<Element>(values[n0 + i][2 * half] * scale[half],
                                           values[n0 + i][2 * half + 1] * scale[half]);
      }
      chunks[half][n0 / 4] = exchange_quad(words);
    }
  }
  const int32_t row = fragment_row(0, 0), col = threadIdx.x % 4 * 8;
  Element* place = gmem + row * row_stride + col;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      ptx::st_v4_if(row + 8 * half < rows && col + 32 * n < cols,
                    place + 8 * half * row_stride + 32 * n, chunks[half][n]);
    }
  }
}

template <typename Element, int kN>
__device__ __forceinline__ void store_rows(Element* gmem, int64_t row_stride, int32_t rows,
                                           int32_t cols, float scale,
                                           const float (&values)[kN][4]) {
  store_rows(gmem, row_stride, rows, cols, {scale, scale}, values);
}

}  // namespace jax_flash
