// Defines the operands, results and options of a call, as plain structs without XLA or Python.
// Handlers fill them from a custom call, and pass them to the CUDA kernels and the CPU kernel.
// Comments give the shapes, innermost axis last:
//   batch    up to kMaxBatchDims axes, folded from all leading and vmapped axes
//   T, S     query and key/value length           N, K  query and key/value heads
//   H, h     head dim of query/key, and of value
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAX_FLASH_HOST_DEVICE __host__ __device__
#else
// Always inlined: sources compiled for different instruction sets include this file. The linker
// would keep one out-of-line copy for all of them, perhaps one that the CPU cannot execute.
#define JAX_FLASH_HOST_DEVICE [[gnu::always_inline]]
#endif

namespace jax_flash {

// The most batch axes after folding. One suffices without vmap. A vmap that leaves some operand
// unmapped can add one, because that operand is broadcast by a stride of 0 and not copied.
inline constexpr int kMaxBatchDims = 4;

// The kernels for larger head dims divide the columns of a head among warps or blocks. They take
// 16-bit operands only: those of sm_90 (sm90/column_blocks.cuh) without modifiers, those of sm_80
// (sm80/wide_config.cuh) with any.
inline constexpr int32_t kMaxUndividedHeadDim = 256;

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16, kFloat8 };  // kFloat8: e4m3

// Describes one operand or result by its address and its strides, in elements. A broadcast axis has
// stride 0. An absent operand has data == nullptr.
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
  // -1: unbounded. If the call has an operand `window`, these are upper bounds of the sizes in it.
  int32_t window_left = -1, window_right = -1;
  float logits_soft_cap = 0.0f;  // 0: none
  // Dropout keeps an element if its 15 random bits, as a number, are >= dropout_threshold, and
  // multiplies it by dropout_scale = 1 / (1 - dropout_threshold / 2^15). Threshold 0: no dropout.
  int32_t dropout_threshold = 0;
  float dropout_scale = 1.0f;
  bool deterministic = false;
  // For float32 operands on a GPU: if true, products are as exact as in float32; if false, their
  // operands are rounded to TF32.
  bool high_precision = false;
  int32_t smem_limit = 0;  // shared memory that a block may use, in bytes; 0: the device's
};

// Returns whether causal order or a window limits which keys a query attends to.
inline bool banded(const Options& options) {
  return options.is_causal || options.window_left >= 0 || options.window_right >= 0;
}

struct Forward {
  Shape shape;
  Options options;
  Operand query;  // [batch, T, N, H]
  Operand key;    // [batch, S, K, H]
  Operand value;  // [batch, S, K, h]

  Operand bias;                   // [batch, N, T, S], any axis broadcast, any float dtype
  Operand mask;                   // [batch, N, T, S], any axis broadcast, one byte per element
  Operand query_seq_lengths;      // [batch] int32
  Operand key_value_seq_lengths;  // [batch] int32
  Operand query_segment_ids;      // [batch, T] int32
  Operand key_value_segment_ids;  // [batch, S] int32
  Operand query_offset;           // [batch] int32
  Operand sinks;                  // [batch, N] float32
  Operand dropout_keys;           // [batch, N, 3] uint32, along col: see modifiers/philox.h
  // [batch, 2] int32, along col: if the call is a block of a larger one, the indices of row 0 and
  // column 0 in the larger call, by which dropout draws its bits. Absent: 0.
  Operand dropout_start;
  // [batch, 2] int32, along col: the left and right sizes of the window, not negative.
  Operand window;
  // Both are added to the logit of query i and key j, depending on the distance
  // d = j - i - query_offset, clamped to int32:
  Operand alibi_slopes;   // [batch, N] float32: alibi_slopes[n] * d
  Operand relative_bias;  // [batch, N, R] float32, R along col, N may be broadcast:
                          // relative_bias[n, clamp(d + R / 2, 0, R - 1)]
  int32_t distances = 0;  // R, at least 1 if there is a relative_bias

  Operand out;  // [batch, T, N, h]; an input of the backward pass
  Operand lse;  // [batch, N, T] float32; an input of the backward pass
  // [batch, N, T] float32: the rounding error of lse, which is the exact logarithm minus lse, and 0
  // where lse is -inf; an input of the backward pass. Present if and only if adds_to_logits(): if a
  // row's greatest logit is near -1e9, lse alone has lost the logarithm of the row's sum.
  Operand lse_low;
  // If true, out and lse are already computed, but not exact for rows with extreme logits. The
  // kernel computes query tiles that have such rows again, and sets lse_low. See
  // needs_exact_logits() of modifiers/units.cuh.
  bool extreme_rows_only = false;

  // Uninitialized. The functions *_workspace_bytes() return its size for a pass and platform.
  void* workspace = nullptr;
};

struct Backward : Forward {
  Operand dout;  // [batch, T, N, h]
  Operand dlse;  // [batch, N, T] float32, or absent: zero

  Operand dquery;  // [batch, T, N, H]
  Operand dkey;    // [batch, S, K, H]
  Operand dvalue;  // [batch, S, K, h]
  // The bias's gradient, summed over every axis whose stride is 0, in the bias's dtype. Batch
  // strides of dbias and bias can differ: under vmap, an unmapped bias still has one gradient per
  // index of the mapped axis. Absent: not wanted.
  Operand dbias;
  // These gradients have every batch axis and all heads, even if the operands are broadcast.
  // Absent: not wanted.
  Operand dalibi_slopes;   // [batch, N] float32
  Operand drelative_bias;  // [batch, N, R] float32, R along col
};

// Returns whether the call adds anything to the scaled products of queries and keys. If so, the
// definition rounds each logit to float32. A logit may then be far from the scaled product, and a
// logit of -inf forbids its pair.
JAX_FLASH_HOST_DEVICE inline bool adds_to_logits(const Forward& params) {
  return params.bias || params.alibi_slopes || params.relative_bias;
}

// Returns how many numbers each head has in the wanted gradients by distance: 1 in dalibi_slopes
// and R in drelative_bias.
JAX_FLASH_HOST_DEVICE inline int64_t distance_floats(const Backward& params) {
  return (params.dalibi_slopes ? 1 : 0) + (params.drelative_bias ? params.distances : 0);
}

// Returns the offset, in elements, of batch entry `index` of an operand; index < shape.batch.
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
