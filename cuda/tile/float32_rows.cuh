// Writes accumulators to rows of float32 in global memory, for products whose operand was read by a
// TransposedReader. That operand's columns have another order: a thread has columns 4 t to 4 t + 3
// of 16 in two neighbouring blocks.
#pragma once

#include <cstdint>

namespace jax_flash {

// Describes rows of `cols` float32, with any stride, at any address.
struct Float32Rows {
  float* data;
  int64_t stride;
  int32_t cols;
  bool aligned;  // true if four columns can be accessed at a time

  __device__ __forceinline__ Float32Rows(float* first, int64_t row_stride, int32_t count)
      : data(first),
        stride(row_stride),
        cols(count),
        aligned(reinterpret_cast<uintptr_t>(first) % 16 == 0 && row_stride % 4 == 0 &&
                count % 4 == 0) {}

  // Calls body(address, columns left, values) for each four columns that exist, of one half of a
  // thread's rows. The warps take 16 columns each, in turn; this warp is the warp_col-th of
  // kWarpCols.
  template <int kWarpCols, int kN, typename Body>
  __device__ __forceinline__ void for_columns(int32_t row, int half, const float (&block)[kN][4],
                                              int warp_col, Body body) const {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      const int32_t col = (n / 2 * kWarpCols + warp_col) * 16 + threadIdx.x % 4 * 4;
      if (col >= cols) continue;
      const float (&first)[4] = block[n], (&second)[4] = block[n + 1];
      body(data + row * stride + col, cols - col,
           make_float4(first[2 * half], second[2 * half], first[2 * half + 1],
                       second[2 * half + 1]));
    }
  }

  // Stores the row of one half, times `scale`.
  template <int kWarpCols = 1, int kN>
  __device__ __forceinline__ void store(int32_t row, int half, const float (&block)[kN][4],
                                        int warp_col = 0, float scale = 1.0f) const {
    for_columns<kWarpCols>(row, half, block, warp_col, [&](float* to, int32_t left, float4 value) {
      const float values[4] = {value.x * scale, value.y * scale, value.z * scale, value.w * scale};
      if (aligned) {
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (e < left) to[e] = values[e];
        }
      }
    });
  }
};

}  // namespace jax_flash
