// Defines the tile sizes, the division of a pass into tasks, and the table of passes. dispatch.cc
// and the kernel of each instruction set share them.
//
// kernel.cc is compiled once per instruction set, into a namespace named after the instruction set.
// Nothing that kernel.cc compiles may have a weak symbol outside that namespace: the linker keeps
// one copy of an inline function for all callers, perhaps the one compiled for AVX-512. Therefore
// kernel.cc uses no standard containers or algorithms, this file uses plain function pointers, and
// shared functions are `static` or always_inline.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash::host {

// The size of a tile of logits. With 64 columns, one word has a bit for each column that a row may
// attend to. 96 rows are a multiple of the microkernel's 6, and amortize the packing of a tile of
// keys and values.
inline constexpr int kBlockQ = 96;
inline constexpr int kBlockKv = 64;
// Packed rows are padded to a multiple of this many floats, the widest vector.
inline constexpr int kRowPadding = 16;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t padded(int64_t dim) { return ceil_div(dim, kRowPadding) * kRowPadding; }
static inline int64_t q_blocks(const Shape& s) { return ceil_div(s.q_len, kBlockQ); }
static inline int64_t kv_blocks(const Shape& s) { return ceil_div(s.kv_len, kBlockKv); }

// Describes how the forward pass is divided into tasks. A task takes `heads` heads of one group and
// `blocks` consecutive blocks of queries of each. They share each tile of keys and values that the
// task packs: packing takes a fourth as long as the work of one block of queries with the tile. A
// group is divided into `parts`, and the blocks of a head into `runs`.
struct ForwardSplit {
  int64_t runs, blocks, parts, heads;
};
inline constexpr int kMaxHeadsPerTask = 8, kMaxBlocksPerTask = 8;
// Blocks share a task as long as each of `threads` still gets several tasks. Only the time depends
// on the split: the order of a row's sums does not.
static inline ForwardSplit forward_split(const Shape& s, int64_t threads) {
  constexpr int64_t kTasksPerThread = 6;
  const int64_t group = s.kv_heads > 0 ? s.heads / s.kv_heads : 1;
  const int64_t blocks = q_blocks(s);
  if (blocks <= 1) {
    const int64_t parts = ceil_div(group, kMaxHeadsPerTask);
    return {blocks, 1, parts, parts > 0 ? ceil_div(group, parts) : 1};
  }
  int64_t shared = s.batch * s.heads * blocks / (threads * kTasksPerThread);
  if (shared > kMaxBlocksPerTask) shared = kMaxBlocksPerTask;
  const int64_t runs = ceil_div(blocks, shared > 1 ? shared : 1);
  return {runs, ceil_div(blocks, runs), group, 1};
}
struct ForwardTasks {
  const Forward& call;
  ForwardSplit split;
};

// Returns how many tasks of the backward pass each (batch, key/value head) is divided into. Each
// task has its own partial dquery. The number depends on shapes alone: the number of threads must
// not change the order of a sum, and thereby its rounding.
static inline int64_t backward_chunks(const Shape& s) {
  constexpr int64_t kWantedTasks = 16, kMaxChunks = 8;
  const int64_t groups = s.batch * s.kv_heads;
  int64_t chunks = groups > 0 ? ceil_div(kWantedTasks, groups) : 1;
  if (chunks > kMaxChunks) chunks = kMaxChunks;
  if (chunks > kv_blocks(s)) chunks = kv_blocks(s);
  return chunks > 1 ? chunks : 1;
}

// The workspace of the backward pass holds floats: delta [batch, N, T], the partial sums of dquery
// [chunks, batch, N, T, padded(H)], then the partial gradients by distance, of slopes and tables
// [chunks, batch, N, distance_floats()].
static inline int64_t delta_floats(const Shape& s) { return padded(s.batch * s.heads * s.q_len); }
static inline int64_t dquery_floats(const Shape& s) {
  return s.batch * s.heads * s.q_len * padded(s.head_dim);
}

// Describes how dbias is divided into tiles, one for each task. Axes that dbias keeps are divided.
// A task sums over the axes of stride 0.
struct BiasTiling {
  int64_t batches, heads, q_tiles, kv_tiles;  // tiles along the axes that are kept
};
static inline BiasTiling bias_tiling(const Shape& s, const Operand& dbias) {
  BiasTiling tiling = {1, 1, 1, 1};
  for (int axis = 0; axis < s.num_batch_dims; ++axis) {
    if (dbias.batch[axis] != 0) tiling.batches *= s.batch_dims[axis];
  }
  if (dbias.head != 0) tiling.heads = s.heads;
  if (dbias.row != 0) tiling.q_tiles = q_blocks(s);
  if (dbias.col != 0) tiling.kv_tiles = kv_blocks(s);
  return tiling;
}

// Returns whether each element of dbias is the gradient of just one logit. If so, the backward pass
// writes dbias itself. Otherwise dbias has a pass of its own.
static inline bool keeps_every_axis(const Shape& s, const Operand& dbias) {
  bool keeps = (dbias.head != 0 || s.heads == 1) && (dbias.row != 0 || s.q_len == 1) &&
               (dbias.col != 0 || s.kv_len == 1);
  for (int axis = 0; axis < s.num_batch_dims; ++axis) {
    keeps = keeps && (dbias.batch[axis] != 0 || s.batch_dims[axis] == 1);
  }
  return keeps;
}

// Points to the passes. A call runs one task; the comments give the number of tasks. A false result
// means that no scratch memory could be allocated.
struct Kernel {
  const char* instruction_set;
  bool (*forward)(const ForwardTasks& tasks, int64_t task);     // batch * K * parts * runs
  bool (*delta)(const Backward& call, int64_t task);            // batch * N
  bool (*backward)(const Backward& call, int64_t task);         // batch * K * chunks
  bool (*reduce_dquery)(const Backward& call, int64_t task);    // batch * N * q_blocks
  bool (*reduce_distance)(const Backward& call, int64_t task);  // batch * N
  bool (*dbias)(const Backward& call, int64_t task);            // the product of BiasTiling
};

namespace baseline {
extern const Kernel kKernel;
}
namespace avx2 {
extern const Kernel kKernel;
}
namespace avx512 {
extern const Kernel kKernel;
}

}  // namespace jax_flash::host
