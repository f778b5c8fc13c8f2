// Describes the kernel that was chosen for a call. plan/choose.h chooses it; the families' launch
// functions read the choice.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "plan/modifiers.h"

namespace jax_flash {

// Configurations of the sm_80 family, by the shared memory that a block may use, in KB: 99 on
// sm_86, sm_89 and sm_120; 163 on sm_80 and sm_87; 227 on sm_90 and sm_100. kNarrow is a
// configuration of 163 KB for head dim 192 with values of at most 128 columns.
enum class SmemClass : int32_t { kSmall = 99, kMedium = 163, kNarrow = 164, kLarge = 227 };

struct Choice {
  int32_t family = 0;             // 80 or 90: the family of the kernel
  int32_t head_dim = 0;           // the largest head dim that the instance takes
  bool general = false;           // true if the instance supports modifiers
  int32_t row = -1;               // index in sm90::kRecipes; sm_90, forward
  int32_t narrow = -1;            // index in sm90::kNarrowBackward, if it is one of them
  bool one_kernel = false;        // sm_90, head dims above 128: one kernel computes all gradients
  bool in_a_block = false;        // sm_90, backward: the kernel whose blocks keep all of a head
  bool decodes = false;           // a kernel of sm80/decode, for few query rows
  bool mask_as_segments = false;  // sm_90: the kernel reads a mask of keys as segments
  bool exact = false;             // products of float32 operands are as exact as those of float32
  SmemClass smem_class = SmemClass::kSmall;  // sm_80 only
  const char* name = "";                     // the kernel's name, for explain()
  const char* reason = "";                   // one clause: why this kernel was chosen
  int32_t queries = 0, keys = 0;             // size of a tile; 0 if not known
};

// Returns the number of query tiles of `rows` rows in a call.
inline int64_t query_tiles(const Shape& shape, int32_t rows) {
  return ceil_div(shape.q_len, rows) * shape.heads * shape.batch;
}

// Returns whether each key/value head has a single query row. XLA multiplies such a row in float32
// at any precision, and kernels are as exact.
inline bool has_one_row(const Shape& shape) {
  return shape.q_len == 1 && shape.heads == shape.kv_heads;
}
inline bool multiplies_exactly(const Shape& shape, const Options& options) {
  return options.high_precision || has_one_row(shape);
}

}  // namespace jax_flash
