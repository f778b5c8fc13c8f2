// Loads the elements of an operand, such as a bias or a mask, that correspond to accumulator
// fragments. A thread's fragment elements are contiguous pairs of columns.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tile/matmul.cuh"

namespace jax_flash {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }

// Holds the numbers of rows and columns that exist. For elements beyond them, the last row or
// column is read instead: their values do not matter, but reads beyond the operand are invalid.
struct Extent {
  int32_t rows, cols;

  __device__ __forceinline__ bool contains(int32_t row_end, int32_t col_end) const {
    return row_end <= rows && col_end <= cols;
  }
};

// Calls body(n, half, first, second) with the two elements of an array at each pair of fragment
// elements. `data` points to row 0 and column 0 of the operand's batch and head. At most kInFlight
// pairs are loaded at the same time; there must be registers for them.
template <typename T, int kInFlight, int kN, typename Body>
__device__ __forceinline__ void for_pairs(const T* data, int64_t row_stride, int64_t col_stride,
                                          int32_t row0, int32_t col0, const Extent& extent,
                                          Body body) {
  struct alignas(2 * sizeof(T)) Pair {
    T first, second;
  };
  const auto visit = [&](auto load) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* row = data + min(row0 + fragment_row(0, 2 * half), extent.rows - 1) * row_stride;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const Pair pair = load(row, n);
        body(n, half, pair.first, pair.second);
        if (n % kInFlight == kInFlight - 1) asm volatile("" ::: "memory");
      }
    }
  };
  const bool together = col_stride == 1 && row_stride % 2 == 0 &&
                        reinterpret_cast<uintptr_t>(data) % sizeof(Pair) == 0 &&
                        extent.contains(row0 + 16, col0 + kN * 8);
  if (__all_sync(0xffffffff, together)) {  // one branch, which the compiler knows to be uniform
    const int32_t col = col0 + fragment_col(0, 0);
    visit([&](const T* row, int n) { return *reinterpret_cast<const Pair*>(row + col + n * 8); });
  } else {
    visit([&](const T* row, int n) {
      const int32_t col = col0 + fragment_col(n, 0);
      return Pair{row[min(col, extent.cols - 1) * col_stride],
                  row[min(col + 1, extent.cols - 1) * col_stride]};
    });
  }
}

}  // namespace jax_flash
