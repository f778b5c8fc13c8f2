// Describes one (batch, head) of a call: its operands, and the keys that its rows may attend to.
#pragma once

#include "host/pack.h"
#include "modifiers/philox.h"

namespace jax_flash::host::JAX_FLASH_ISA {

// Returns the address of element (batch, row 0, head, column 0).
inline char* address(const Shape& shape, const Operand& operand, int64_t batch, int64_t head,
                     int64_t element_size) {
  const int64_t offset = batch_offset(shape, operand, batch) + head * operand.head;
  return static_cast<char*>(operand.data) + offset * element_size;
}

inline Rows rows_of(const Shape& shape, const Operand& operand, int64_t batch, int64_t head,
                    int dim) {
  return {address(shape, operand, batch, head, size_of(operand.dtype)), operand.dtype, operand.row,
          dim};
}

inline float* floats_of(const Shape& shape, const Operand& operand, int64_t batch, int64_t head) {
  return reinterpret_cast<float*>(address(shape, operand, batch, head, sizeof(float)));
}

// Returns element `col` of an operand of 32-bit integers of shape [batch], [batch, N], [batch, C]
// or [batch, N, C].
inline int32_t int_of(const Shape& shape, const Operand& operand, int64_t batch, int64_t head = 0,
                      int64_t col = 0) {
  const char* data = address(shape, operand, batch, head, sizeof(int32_t));
  return reinterpret_cast<const int32_t*>(data)[col * operand.col];
}

// Describes the [T, S] matrix of the bias, its gradient or the mask, for one batch and head.
struct Plane {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t row = 0, col = 0;

  char* at(int64_t i, int64_t j, int64_t element_size) const {
    return data + (i * row + j * col) * element_size;
  }
};

struct SegmentIds {
  const int32_t* data = nullptr;
  int64_t stride = 0;

  int32_t operator[](int64_t index) const { return data[index * stride]; }
};

// Key positions [begin, end).
struct Span {
  int64_t begin, end;
};

// Describes the slope and the relative bias, which depend on the distance between query and key;
// see params.h.
struct ByDistance {
  bool present = false;
  int64_t offset = 0;
  float slope = 0.0f;            // 0 without slopes
  const float* table = nullptr;  // [count], or absent
  int64_t count = 0;
  bool forbids = false;  // true if the table contains -inf

  int64_t of(int64_t j_minus_i) const {
    return min_of<int64_t>(max_of<int64_t>(j_minus_i - offset, INT32_MIN), INT32_MAX);
  }
  int64_t index(int64_t distance) const {
    return min_of(max_of<int64_t>(distance + count / 2, 0), count - 1);
  }
};

struct Head {
  const Options* options;
  Rows query, key, value;
  int64_t q_len, kv_len;  // T and S, or the sequence lengths
  // Row i may attend to keys [i + first, i + last) within [0, kv_len), as far as causal order and
  // window allow. 64 bits hold the sum of any row, offset and window.
  int64_t first, last;
  Plane bias, mask;
  ByDistance distance;
  SegmentIds query_segments, kv_segments;
  DropoutKeys dropout_keys;
  uint32_t dropout_row, dropout_col;  // dropout's indices of row 0 and column 0

  bool adds_to_logits() const { return bias.data || distance.present; }

  Span span(int64_t i) const {
    const int64_t begin = min_of(max_of<int64_t>(i + first, 0), kv_len);
    return {begin, max_of(begin, min_of(i + last, kv_len))};
  }
  // Return the keys that some row, or every row, of [begin, end) may attend to.
  Span any_of(int64_t begin, int64_t end) const { return {span(begin).begin, span(end - 1).end}; }
  Span all_of(int64_t begin, int64_t end) const { return {span(end - 1).begin, span(begin).end}; }
};

inline Plane plane_of(const Shape& shape, const Operand& operand, int64_t batch, int64_t head,
                      int64_t element_size) {
  if (operand.data == nullptr) return {};
  return {address(shape, operand, batch, head, element_size), operand.dtype, operand.row,
          operand.col};
}

inline SegmentIds segments_of(const Shape& shape, const Operand& operand, int64_t batch) {
  if (operand.data == nullptr) return {};
  const char* data = address(shape, operand, batch, 0, sizeof(int32_t));
  return {reinterpret_cast<const int32_t*>(data), operand.row};
}

// Returns a sequence length of a batch, clamped to [0, limit], or the limit if there are no
// lengths.
inline int64_t length_of(const Shape& shape, const Operand& lengths, int64_t batch, int64_t limit) {
  if (lengths.data == nullptr) return limit;
  return min_of(max_of<int64_t>(int_of(shape, lengths, batch), 0), limit);
}

inline ByDistance by_distance_of(const Forward& call, int64_t batch, int64_t n) {
  const Shape& shape = call.shape;
  ByDistance distance;
  distance.present = call.alibi_slopes.data || call.relative_bias.data;
  if (call.query_offset.data) distance.offset = int_of(shape, call.query_offset, batch);
  if (call.alibi_slopes.data) distance.slope = *floats_of(shape, call.alibi_slopes, batch, n);
  if (call.relative_bias.data) {
    distance.table = floats_of(shape, call.relative_bias, batch, n);
    distance.count = call.distances;
    for (int64_t r = 0; r < distance.count; ++r) {
      distance.forbids |= distance.table[r] == -kInfinity;
    }
  }
  return distance;
}

inline Head head_of(const Forward& call, int64_t batch, int64_t n) {
  constexpr int64_t kUnbounded = int64_t{1} << 40;
  const Shape& shape = call.shape;
  const Options& options = call.options;
  const int64_t kv_head = n / (shape.heads / shape.kv_heads);
  const int64_t offset = call.query_offset.data ? int_of(shape, call.query_offset, batch) : 0;

  Head head = {};
  head.options = &options;
  head.query = rows_of(shape, call.query, batch, n, shape.head_dim);
  head.key = rows_of(shape, call.key, batch, kv_head, shape.head_dim);
  head.value = rows_of(shape, call.value, batch, kv_head, shape.value_dim);
  head.q_len = length_of(shape, call.query_seq_lengths, batch, shape.q_len);
  head.kv_len = length_of(shape, call.key_value_seq_lengths, batch, shape.kv_len);
  const bool has_window = call.window.data != nullptr;
  const int64_t left = has_window ? int_of(shape, call.window, batch, 0, 0) : options.window_left;
  const int64_t right = has_window ? int_of(shape, call.window, batch, 0, 1) : options.window_right;
  head.first = left >= 0 ? offset - left : -kUnbounded;
  head.last = right >= 0 ? offset + right + 1 : kUnbounded;
  if (options.is_causal) head.last = min_of(head.last, offset + 1);
  head.bias = plane_of(shape, call.bias, batch, n, size_of(call.bias.dtype));
  head.mask = plane_of(shape, call.mask, batch, n, 1);
  head.distance = by_distance_of(call, batch, n);
  head.query_segments = segments_of(shape, call.query_segment_ids, batch);
  head.kv_segments = segments_of(shape, call.key_value_segment_ids, batch);
  if (options.dropout_threshold != 0) {
    const auto word = [&](int64_t i) {
      return static_cast<uint32_t>(int_of(shape, call.dropout_keys, batch, n, i));
    };
    head.dropout_keys = {word(0), word(1), word(2)};
    if (call.dropout_start.data) {
      head.dropout_row = static_cast<uint32_t>(int_of(shape, call.dropout_start, batch, 0, 0));
      head.dropout_col = static_cast<uint32_t>(int_of(shape, call.dropout_start, batch, 0, 1));
    }
  }
  return head;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
