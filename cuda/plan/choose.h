// Decides which CUDA kernel takes a call, and how much workspace it needs. This is the only place
// that decides: the handlers, the size of the workspace and explain() all ask here.
//
// Plain C++: nothing here needs a GPU.
#pragma once

#include <cstdint>
#include <functional>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/modifiers.h"
#include "plan/recipes.h"
#include "status.h"

namespace jax_flash {

// The properties of a GPU that a choice depends on.
struct Device {
  int32_t capability = 0;       // 90 for compute capability 9.0
  int32_t multiprocessors = 0;  // the number of multiprocessors
  int32_t smem_bytes = 0;       // the most shared memory that a block may use
};

// Configurations of the sm_80 family, named by the shared memory that a block may use, in KB: 99 on
// sm_86, sm_89 and sm_120; 163 on sm_80 and sm_87; 227 on sm_90 and sm_100. kNarrow: values of at
// most 128 columns at head dim 192.
enum class SmemClass : int32_t { kSmall = 99, kMedium = 163, kNarrow = 164, kLarge = 227 };

struct Choice {
  int32_t family = 0;                        // 80 or 90: the family of the kernel
  int32_t head_dim = 0;                      // the instance's: the largest that it takes
  bool general = false;                      // true if it is the instance for modifiers
  int32_t row = -1;                          // index in sm90::kRecipes; sm_90, forward
  uint32_t only = kNoModifier;               // the one modifier that a backward kernel is made for
  bool one_kernel = false;                   // true above 128 if one computes all gradients; sm_90
  SmemClass smem_class = SmemClass::kSmall;  // used by sm_80
  const char* name = "";                     // the kernel's, for explain()
  const char* reason = "";                   // one clause: why this kernel was chosen
  int32_t queries = 0, keys = 0;             // size of a tile; 0: not known
};

// Returns the head dim of the smallest instance of this build that takes the call, or 0. Its
// arguments are the family, and whether it is the instance for modifiers.
using FindInstance = std::function<int32_t(int32_t family, bool general)>;

// Chooses a kernel. `family` is 0 for the best that the device runs, or 80 or 90. Unimplemented: no
// kernel takes the call.
Status choose_forward(const Forward& params, int32_t family, const Device& device,
                      const FindInstance& find, Choice& choice);
Status choose_backward(const Backward& params, int32_t family, const Device& device,
                       const FindInstance& find, Choice& choice);

// The features of a call, besides its shape and dtype, that decide how much workspace the forward
// pass needs.
struct ForwardFeatures {
  bool segments = false, bias = false;  // true if it has segment ids, or a bias
  bool others = false;                  // true if it has a soft cap, or dropout
  int64_t mask_matrices = 0;            // the product of the mask's batch axes and heads, or 0
  int32_t mask_rows = 0;                // its T, or 1
  int64_t value_matrices = 0;           // the product of V's batch axes and heads
};

// Returns the bytes that the passes need at `workspace`, on any device; 0: it may be null. `dtype`:
// that of the operands.
int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features);
int64_t forward_workspace_bytes(const Forward& params);
int64_t backward_workspace_bytes(const Shape& shape, const BackwardFeatures& features);

// Returns the number of query tiles of `rows` rows in a call.
inline int64_t query_tiles(const Shape& shape, int32_t rows) {
  return (int64_t{shape.q_len} + rows - 1) / rows * shape.heads * shape.batch;
}

// Returns whether position limits which keys a query attends to.
inline bool banded(const Options& options) {
  return options.is_causal || options.window_left >= 0 || options.window_right >= 0;
}

}  // namespace jax_flash
