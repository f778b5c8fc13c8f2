// Defines what a call of the operation consists of, as plain structs: no XLA, no Python. Handlers
// fill them from a custom call; every kernel, on the CPU and on a GPU, takes them. Shapes are given
// in comments, innermost axis last, with
//   batch    up to kMaxBatchDims axes, folded from all leading and vmapped axes
//   T, S     query and key/value length           N, K  query and key/value heads
//   H, h     head dim of query/key, and of value
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_FLASH_HOST_DEVICE __host__ __device__
#else
// Always inlined: sources compiled for different instruction sets include this file, and a shared
// out-of-line copy could be one that the CPU cannot execute.
#define JAX_FLASH_HOST_DEVICE [[gnu::always_inline]]
#endif

namespace jax_flash {

// Number of batch axes after folding. One suffices for a plain call; each vmap that leaves some
// operand unmapped can add one, since that operand is not copied.
inline constexpr int kMaxBatchDims = 4;

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8 };  // kFloat8: e4m3

// Describes one operand or result: where it is and how far apart its elements are, in elements. A
// broadcast axis has stride 0. An absent operand has data == nullptr.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;  // set for floating-point operands only
  int64_t batch[kMaxBatchDims] = {};
  int64_t row = 0;   // stride along T for query-like operands, S for key-like ones
  int64_t head = 0;  // stride along N or K
  int64_t col = 0;   // stride along H, h or, for bias and mask, S

  JAX_FLASH_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

struct Shape {
  int num_batch_dims = 1;
  int64_t batch_dims[kMaxBatchDims] = {1, 1, 1, 1};
  int64_t batch = 1;                    // the product of batch_dims
  int32_t q_len = 0, kv_len = 0;        // T, S
  int32_t heads = 0, kv_heads = 0;      // N, K; N is a multiple of K
  int32_t head_dim = 0, value_dim = 0;  // H, h
};

struct Options {
  float scale = 1.0f;
  bool is_causal = false;
  // -1: unbounded. If the call has an operand `window`, these are upper bounds of its sizes.
  int32_t window_left = -1, window_right = -1;
  float logits_soft_cap = 0.0f;  // 0: none
  // Dropout keeps an element whose 15 random bits are >= dropout_threshold, and
  // multiplies it by dropout_scale = 1 / (1 - dropout_threshold / 2^15). 0: no dropout.
  uint32_t dropout_threshold = 0;
  float dropout_scale = 1.0f;
  bool deterministic = false;
  // Products of float32 operands on a GPU are as exact as in float32; otherwise their operands are
  // rounded to TF32.
  bool high_precision = false;
  int32_t smem_limit = 0;  // shared memory that a block may use, in bytes; 0: the device's
};

struct Forward {
  Shape shape;
  Options options;
  Operand query;  // [batch, T, N, H]
  Operand key;    // [batch, S, K, H]
  Operand value;  // [batch, S, K, h]

  Operand bias;                   // [batch, N, T, S], any axis broadcast, any float dtype
  Operand mask;                   // [batch, N, T, S], any axis broadcast, one byte each
  Operand query_seq_lengths;      // [batch] int32
  Operand key_value_seq_lengths;  // [batch] int32
  Operand query_segment_ids;      // [batch, T] int32
  Operand key_value_segment_ids;  // [batch, S] int32
  Operand query_offset;           // [batch] int32
  Operand sinks;                  // [batch, N] float32
  Operand dropout_keys;           // [batch, N, 3] uint32, along col: see modifiers/philox.h
  // [batch, 2] int32, along col: the indices i and j that dropout uses for row 0 and column 0 if
  // the call is a block of a larger one. Absent: 0.
  Operand dropout_start;
  // [batch, 2] int32, along col: left and right sizes of the window, not negative.
  Operand window;
  // Added to the logit of query i and key j, by their distance d = j - i - query_offset, which is
  // clamped to int32:
  Operand alibi_slopes;   // [batch, N] float32: alibi_slopes[n] * d
  Operand relative_bias;  // [batch, N, R] float32, R along col, N may be broadcast:
                          // relative_bias[n, clamp(d + R / 2, 0, R - 1)]
  int32_t distances = 0;  // R, at least 1 if there is a relative_bias

  Operand out;  // [batch, T, N, h]; an input of the backward pass
  Operand lse;  // [batch, N, T] float32; likewise
  // [batch, N, T] float32: the difference between the exact logarithm and lse, 0 where lse is -inf;
  // likewise. Present if and only if adds_to_logits(): near a logit of -1e9, lse alone has lost the
  // logarithm of the sum.
  Operand lse_low;
  // If true, out, lse and lse_low are already computed, except for rows whose logits are extreme:
  // query tiles that have such rows are computed again. See needs_exact_logits() of
  // modifiers/logits.cuh.
  bool extreme_rows_only = false;

  void* workspace = nullptr;  // *_workspace_bytes() of the pass and platform, uninitialised
};

struct Backward : Forward {
  Operand dout;  // [batch, T, N, h]
  Operand dlse;  // [batch, N, T] float32, or absent: zero

  Operand dquery;  // [batch, T, N, H]
  Operand dkey;    // [batch, S, K, H]
  Operand dvalue;  // [batch, S, K, h]
  // The bias's gradient, summed over every axis whose stride is 0, in the bias's dtype. Its batch
  // strides can differ from the bias's: a vmapped axis that the bias is not mapped over still has
  // one gradient per index. Absent: not wanted.
  Operand dbias;
  // Gradients with every batch axis and all heads, whatever the operands broadcast. Absent: not
  // wanted.
  Operand dalibi_slopes;   // [batch, N] float32
  Operand drelative_bias;  // [batch, N, R] float32, R along col
};

// Returns whether the call adds anything to the products of queries and keys. A logit is then a
// float32 by definition, and may be far from the products; one of -inf forbids.
JAX_FLASH_HOST_DEVICE inline bool adds_to_logits(const Forward& params) {
  return params.bias || params.alibi_slopes || params.relative_bias;
}

// Returns how many numbers a head has in the gradients that go by distance: 1 and R, if wanted.
JAX_FLASH_HOST_DEVICE inline int64_t distance_floats(const Backward& params) {
  return (params.dalibi_slopes ? 1 : 0) + (params.drelative_bias ? params.distances : 0);
}

// Returns the offset, in elements, of batch `index` (of shape.batch) in an operand.
JAX_FLASH_HOST_DEVICE inline int64_t batch_offset(const Shape& shape, const Operand& operand,
                                                  int64_t index) {
  int64_t offset = 0;
  for (int axis = shape.num_batch_dims - 1; axis >= 0; --axis) {
    offset += index % shape.batch_dims[axis] * operand.batch[axis];
    index /= shape.batch_dims[axis];
  }
  return offset;
}

}  // namespace jax_flash
