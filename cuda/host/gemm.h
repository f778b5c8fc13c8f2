// Computes C = A B or C += A B in float32, for tiles that fit the caches.
//
// The microkernel keeps up to 6 x kPanelVectors vectors of C in registers. For each k it loads
// kPanelVectors vectors of B, and broadcasts an element of each row of A to multiply-adds. With
// AVX-512 these are 24 multiply-adds, which take 12 cycles, and 10 loads. So arithmetic is the
// limit as long as the panel of B stays in the first-level cache. At large head dims, kMaxDepth
// keeps the panel small enough.
#pragma once

#include "host/simd.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// A left operand: A(i, k) = data[i * row + k * depth].
struct Left {
  const float* data;
  int64_t row, depth;
};

// A right operand or a result: element (i, j) is data[i * row + j]. Rows are padded to whole
// vectors.
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

// Computes rows [0, kRows) of C, kVectors vectors wide.
template <int kRows, int kVectors>
JAX_FLASH_INLINE void microkernel(int depth, bool accumulate, Left a, Matrix b, Matrix c) {
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

// Computes `blocks` times kRows rows of C. The arguments are scalars, and the loop is inside the
// function, because a structure passed on the stack would be written in parts and read as a whole.
// Such a read waits until all earlier instructions have retired: the multipliers would idle for
// some 60 cycles.
template <int kRows, int kVectors>
void row_blocks(int64_t blocks, int depth, bool accumulate, const float* a, int64_t a_row,
                int64_t a_depth, float* b, int64_t b_row, float* c, int64_t c_row) {
  for (int64_t i = 0; i < blocks; ++i) {
    microkernel<kRows, kVectors>(depth, accumulate, {a, a_row, a_depth}, {b, b_row}, {c, c_row});
    a += kRows * a_row;
    c += kRows * c_row;
  }
}

using RowBlocks = decltype(&row_blocks<1, 1>);

template <int... kIndex>
constexpr auto row_blocks_table(std::integer_sequence<int, kIndex...>) {
  struct Table {
    RowBlocks at[sizeof...(kIndex)];
  };
  return Table{{&row_blocks<kIndex / kPanelVectors + 1, kIndex % kPanelVectors + 1>...}};
}
inline constexpr auto kRowBlocks =
    row_blocks_table(std::make_integer_sequence<int, kPanelRows * kPanelVectors>());

// Computes C of any size. Columns are computed in whole vectors. What C holds already is added to
// the whole product, so that an element is rounded only once beside a great number.
inline void gemm(Product size, Left a, Matrix b, Matrix c) {
  const int vectors = (size.cols + kLanes - 1) / kLanes;
  const int whole = size.rows / kPanelRows, rest = size.rows % kPanelRows;
  const int step = size.accumulate ? max_of(size.depth, 1) : kMaxDepth;
  for (int k = 0; k < size.depth || k == 0; k += step) {
    const int depth = min_of(size.depth - k, step);
    const bool accumulate = size.accumulate || k > 0;
    for (int v = 0; v < vectors; v += kPanelVectors) {
      const int width = min_of(vectors - v, kPanelVectors);
      const auto rows = [&](int height, int first, int blocks) {
        if (height == 0 || blocks == 0) return;
        kRowBlocks.at[(height - 1) * kPanelVectors + width - 1](
            blocks, depth, accumulate, a.data + first * a.row + k * a.depth, a.row, a.depth,
            b.data + k * b.row + v * kLanes, b.row, c.data + first * c.row + v * kLanes, c.row);
      };
      rows(kPanelRows, 0, whole);
      rows(rest, whole * kPanelRows, 1);
    }
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
