// Decides which CUDA kernel takes a call, and how much workspace it needs. This is the one
// decision: the handlers, the size of the workspace and explain() all ask here.
//
// Plain C++: nothing here needs a GPU.
#pragma once

#include <cstdint>
#include <functional>

#include "params.h"
#include "plan/recipes.h"
#include "status.h"

namespace jax_flash {

// What a choice depends on, of a GPU.
struct Device {
  int32_t capability = 0;       // 90 for compute capability 9.0
  int32_t multiprocessors = 0;  // how many
  int32_t smem_bytes = 0;       // of shared memory that a block may have, at most
};

// Configurations of the sm_80 family by the shared memory that a block may have, in KB: 99 on
// sm_86, sm_89 and sm_120; 163 on sm_80 and sm_87; 227 on sm_90 and sm_100. kNarrow: values of at
// most 128 columns at head dim 192.
enum class SmemClass : int32_t { kSmall = 99, kMedium = 163, kNarrow = 164, kLarge = 227 };

struct Choice {
  int32_t family = 0;                        // 80 or 90: whose kernels
  int32_t head_dim = 0;                      // the instance's: the most that it takes
  bool general = false;                      // whether it is the instance for modifiers
  int32_t row = -1;                          // of sm90::kRecipes; sm_90, forward
  SmemClass smem_class = SmemClass::kSmall;  // sm_80
  const char* name = "";                     // of the kernel, for explain()
  const char* reason = "";                   // why this one: one clause
  int32_t queries = 0, keys = 0;             // of a tile; 0: not known
};

// The head dim of the smallest instance of this build that takes the call, or 0: by family, and
// whether it is the one for modifiers.
using FindInstance = std::function<int32_t(int32_t family, bool general)>;

// `family` is 0 for the best that the device runs, or 80 or 90. Unimplemented: no kernel takes the
// call.
Status choose_forward(const Forward& params, int32_t family, const Device& device,
                      const FindInstance& find, Choice& choice);
Status choose_backward(const Backward& params, int32_t family, const Device& device,
                       const FindInstance& find, Choice& choice);

// What of a call, besides its shape and dtype, decides how much workspace the forward pass needs.
struct ForwardFeatures {
  bool segments = false, bias = false;  // whether it has segment ids, or a bias
  bool others = false;                  // a soft cap, or dropout
  int64_t mask_matrices = 0;            // the product of the mask's batch axes and heads, or 0
  int32_t mask_rows = 0;                // its T, or 1
  int64_t value_matrices = 0;           // the product of V's batch axes and heads
};

// Bytes that the passes need at `workspace`, on any device; 0: it may be null. `dtype`: the
// operands'.
int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features);
int64_t forward_workspace_bytes(const Forward& params);
int64_t backward_workspace_bytes(const Shape& shape, bool segments, bool deterministic);

// Query tiles of so many rows in a call.
inline int64_t query_tiles(const Shape& shape, int32_t rows) {
  return (int64_t{shape.q_len} + rows - 1) / rows * shape.heads * shape.batch;
}

// Whether position limits which keys a query attends to.
inline bool banded(const Options& options) {
  return options.is_causal || options.window_left >= 0 || options.window_right >= 0;
}

}  // namespace jax_flash
