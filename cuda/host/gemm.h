// C = A B or C += A B in float32, for tiles that fit the caches.
//
// The microkernel keeps up to 6 x kPanelVectors vectors of C in registers; for each
// k it loads kPanelVectors vectors of B and broadcasts an element of each row of A
// into multiply-adds. With AVX-512 that is 24 multiply-adds, 12 cycles, against 10
// loads: bound by arithmetic, as long as the panel of B stays in the first-level
// cache. kMaxDepth keeps it there for large head dims.
#pragma once

#include "host/simd.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// A(i, k) = data[i * row + k * depth].
struct Left {
  const float* data;
  int64_t row, depth;
};

// Element (i, j) is data[i * row + j]; rows are padded to whole vectors.
struct Matrix {
  float* data;
  int64_t row;
};

JAX_FLASH_INLINE Matrix from_row(Matrix m, int64_t row) { return {m.data + row * m.row, m.row}; }
JAX_FLASH_INLINE Left as_left(Matrix m) { return {m.data, m.row, 1}; }
JAX_FLASH_INLINE Left transposed(Matrix m) { return {m.data, 1, m.row}; }

struct Product {
  int rows, cols, depth;
  bool accumulate;  // C += A B
};

inline constexpr int kPanelRows = 6;
inline constexpr int kMaxDepth = 128;

using Microkernel = void (*)(int depth, bool accumulate, Left a, Matrix b, Matrix c);

template <int kRows, int kVectors>
void microkernel(int depth, bool accumulate, Left a, Matrix b, Matrix c) {
  Vec sum[kRows][kVectors] = {};
  for (int k = 0; k < depth; ++k) {
    Vec right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = load(b.data + v * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
      const Vec left = splat(a.data[i * a.row]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[i][v] += left * right[v];
    }
    a.data += a.depth;
    b.data += b.row;
  }
#pragma GCC unroll 6
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* out = c.data + i * c.row + v * kLanes;
      store(out, accumulate ? load(out) + sum[i][v] : sum[i][v]);
    }
  }
}

template <int... kIndex>
constexpr auto microkernels(std::integer_sequence<int, kIndex...>) {
  struct Table {
    Microkernel at[sizeof...(kIndex)];
  };
  return Table{{&microkernel<kIndex / kPanelVectors + 1, kIndex % kPanelVectors + 1>...}};
}
inline constexpr auto kMicrokernels =
    microkernels(std::make_integer_sequence<int, kPanelRows * kPanelVectors>());

// Columns are computed in whole vectors.
inline void gemm(Product size, Left a, Matrix b, Matrix c) {
  const int vectors = (size.cols + kLanes - 1) / kLanes;
  for (int k = 0; k < size.depth || k == 0; k += kMaxDepth) {
    const int depth = min_of(size.depth - k, kMaxDepth);
    for (int v = 0; v < vectors; v += kPanelVectors) {
      const int width = min_of(vectors - v, kPanelVectors) - 1;
      const Matrix panel = {b.data + k * b.row + v * kLanes, b.row};
      for (int i = 0; i < size.rows; i += kPanelRows) {
        const int height = min_of(size.rows - i, kPanelRows) - 1;
        const Left left = {a.data + i * a.row + k * a.depth, a.row, a.depth};
        const Matrix to = {c.data + i * c.row + v * kLanes, c.row};
        kMicrokernels.at[height * kPanelVectors + width](depth, size.accumulate || k > 0, left,
                                                         panel, to);
      }
    }
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
