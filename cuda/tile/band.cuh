// Computes the band: the logits that position alone allows. Lengths, causal order, window and
// offset together allow row i the columns [i + lo, i + hi) within [0, kv_len), an interval that
// moves by one from row to row. All of these are known only at run time, and some only in device
// memory.
#pragma once

#include <cstdint>

#include "params.h"
#include "tile/batch_index.cuh"

namespace jax_flash {

// Holds how many keys before and after its own position a query may attend to; -1: any number.
struct Window {
  int32_t left, right;

  __host__ __device__ __forceinline__ Window(const Options& options, const int32_t* sizes = nullptr)
      : left(sizes ? sizes[0] : options.window_left),
        right(options.is_causal ? 0
              : sizes           ? sizes[1]
                                : options.window_right) {}
};

// Holds the columns [i + lo, i + hi) that each row i may attend to by its position.
struct Band {
  int32_t lo, hi;  // clamped to [-q_len, kv_len], which allows the same pairs
  int32_t q_len, kv_len;

  Band() = default;
  // Makes the band of given lengths, offset and window. Callable on the host, too.
  __host__ __device__ __forceinline__ Band(const Window& window, int32_t rows, int32_t cols,
                                           int64_t offset)
      : q_len(rows), kv_len(cols) {
    const int64_t right = window.right;
    lo = window.left < 0 ? -q_len : clamp_shift(offset - window.left);
    hi = right < 0 ? kv_len : clamp_shift(offset + right + 1);
  }
  __device__ __forceinline__ Band(const Forward& params, const BatchIndex& batch)
      : Band(Window(params.options,
                    params.window ? batch.pointer<const int32_t>(params.window) : nullptr),
             clamped_length(params.query_seq_lengths, batch, params.shape.q_len),
             clamped_length(params.key_value_seq_lengths, batch, params.shape.kv_len),
             params.query_offset ? *batch.pointer<const int32_t>(params.query_offset) : 0) {}

  // True if a call's band depends on its operands, and may therefore differ between batches.
  static bool varies(const Forward& params) {
    return params.query_seq_lengths || params.key_value_seq_lengths || params.query_offset ||
           params.window;
  }

  // Returns the band of up to `rows` rows from row0 on, which then is row 0.
  __device__ __forceinline__ Band rows_from(int32_t row0, int32_t rows) const {
    Band part = *this;
    part.lo += row0;
    part.hi += row0;
    part.q_len = min(max(q_len - row0, 0), rows);
    return part;
  }

  // Return the columns that row i may attend to: [first_col(i), end_col(i)).
  __device__ __forceinline__ int32_t first_col(int32_t row) const { return clamp_col(row + lo); }
  __device__ __forceinline__ int32_t end_col(int32_t row) const { return clamp_col(row + hi); }

  // Return the rows that may attend to some column of [col0, col1), col0 < kv_len: [first_row,
  // end_row).
  __device__ __forceinline__ int32_t first_row(int32_t col0) const { return max(0, col0 - hi + 1); }
  __device__ __forceinline__ int32_t end_row(int32_t col1) const {
    return min(q_len, min(col1, kv_len) - lo);
  }

  // True if every row of [row0, row1) may attend to every column of [col0, col1).
  __device__ __forceinline__ bool all_allowed(int32_t row0, int32_t row1, int32_t col0,
                                              int32_t col1) const {
    return col1 <= kv_len && col0 >= row1 - 1 + lo && col1 <= row0 + hi;
  }
  // Holds the range [first, last] of first rows of those tiles of kRows rows in which all rows that
  // exist may attend to every column of [col0, col1).
  struct FirstRows {
    int32_t first, last;
  };
  template <int kRows>
  __device__ __forceinline__ FirstRows unmasked_tiles(int32_t col0, int32_t col1) const {
    const int32_t end = col0 - lo + 1;  // end of the rows
    return {col1 <= kv_len ? col1 - hi : INT32_MAX, q_len <= end ? INT32_MAX : end - kRows};
  }

 private:
  __device__ __forceinline__ int32_t clamp_col(int32_t col) const {
    return min(max(col, 0), kv_len);
  }
  __host__ __device__ __forceinline__ int32_t clamp_shift(int64_t shift) const {
    const int64_t least = -q_len, greatest = kv_len;
    return static_cast<int32_t>(shift < least ? least : shift > greatest ? greatest : shift);
  }
  static __device__ __forceinline__ int32_t clamped_length(const Operand& lengths,
                                                           const BatchIndex& batch, int32_t size) {
    return lengths ? min(max(*batch.pointer<const int32_t>(lengths), 0), size) : size;
  }
};

// Holds a half-open range, of tiles, rows or keys.
struct Range {
  int32_t first, end;
};

// Returns the key/value tiles of kBlockKv columns that rows [row0, row1) read.
template <int kBlockKv>
__device__ __forceinline__ Range kv_tiles(const Band& band, int32_t row0, int32_t row1) {
  row1 = min(row1, band.q_len);
  if (row0 >= row1) return {0, 0};
  const int32_t first = band.first_col(row0), end = band.end_col(row1 - 1);
  if (first >= end) return {0, 0};
  return {first / kBlockKv, (end + kBlockKv - 1) / kBlockKv};
}

// Returns the query tiles of kBlockQ rows that read columns [col0, col1).
template <int kBlockQ>
__device__ __forceinline__ Range q_tiles(const Band& band, int32_t col0, int32_t col1) {
  if (col0 >= band.kv_len) return {0, 0};
  const int32_t first = band.first_row(col0), end = band.end_row(col1);
  if (first >= end) return {0, 0};
  return {first / kBlockQ, (end + kBlockQ - 1) / kBlockQ};
}

}  // namespace jax_flash
