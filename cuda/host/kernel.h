// What dispatch.cc and the kernel of each instruction set share: the tile sizes, how
// a pass splits into tasks, and the table of passes.
//
// kernel.cc is compiled once per instruction set, into a namespace named after it.
// Nothing it compiles may have a weak symbol outside that namespace: the linker keeps
// one copy of an inline function, perhaps the one compiled for AVX-512, for every
// caller. Hence no standard containers or algorithms there, plain function pointers
// here, and `static` or always_inline on what is shared.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash::host {

// A tile of logits is kBlockQ x kBlockKv. One row of it has 64 columns so that the
// columns it may attend to are the bits of one word; 96 rows are a multiple of the
// microkernel's 6, and amortise packing a tile of keys and values.
inline constexpr int kBlockQ = 96;
inline constexpr int kBlockKv = 64;
// Packed rows are padded to this many floats: the widest vector.
inline constexpr int kRowPadding = 16;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t padded(int64_t dim) { return ceil_div(dim, kRowPadding) * kRowPadding; }
static inline int64_t q_blocks(const Shape& s) { return ceil_div(s.q_len, kBlockQ); }
static inline int64_t kv_blocks(const Shape& s) { return ceil_div(s.kv_len, kBlockKv); }

// A task of the forward pass: `heads` heads of one group times `blocks` consecutive blocks of
// queries, which share each tile of keys and values that it packs. Packing a tile costs a fourth
// of what one block of queries computes with it. There are `parts` of a group and `runs` of blocks.
struct ForwardSplit {
  int64_t runs, blocks, parts, heads;
};
inline constexpr int kMaxHeadsPerTask = 8, kMaxBlocksPerTask = 8;
// Blocks share a task as long as each of `threads` still gets several tasks. Nothing but time
// depends on the split, since a row's sums do not.
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

// The backward pass gives each (batch, key/value head) to `chunks` tasks, each with
// its own partial dquery. A function of shapes alone: the number of threads must not
// change how a sum is split, and so its rounding.
static inline int64_t backward_chunks(const Shape& s) {
  constexpr int64_t kWantedTasks = 16, kMaxChunks = 8;
  const int64_t groups = s.batch * s.kv_heads;
  int64_t chunks = groups > 0 ? ceil_div(kWantedTasks, groups) : 1;
  if (chunks > kMaxChunks) chunks = kMaxChunks;
  if (chunks > kv_blocks(s)) chunks = kv_blocks(s);
  return chunks > 1 ? chunks : 1;
}

// The workspace of the backward pass, in floats: delta [batch, N, T], the partial dquery
// [chunks, batch, N, T, padded(H)], then the partial gradients that go by distance, of the slopes
// and of the tables [chunks, batch, N, distance_floats()].
static inline int64_t delta_floats(const Shape& s) { return padded(s.batch * s.heads * s.q_len); }
static inline int64_t dquery_floats(const Shape& s) {
  return s.batch * s.heads * s.q_len * padded(s.head_dim);
}

// How dbias splits into tiles, one a task: axes it keeps are tiled, axes of stride 0
// are summed over by the task.
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

// Whether each element of dbias is the gradient of just one logit. The backward pass
// then writes it on its way, and needs no pass of its own for it.
static inline bool keeps_every_axis(const Shape& s, const Operand& dbias) {
  bool keeps = (dbias.head != 0 || s.heads == 1) && (dbias.row != 0 || s.q_len == 1) &&
               (dbias.col != 0 || s.kv_len == 1);
  for (int axis = 0; axis < s.num_batch_dims; ++axis) {
    keeps = keeps && (dbias.batch[axis] != 0 || s.batch_dims[axis] == 1);
  }
  return keeps;
}

// The passes. Each call does one task; a false result means that no scratch memory
// could be allocated.
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
