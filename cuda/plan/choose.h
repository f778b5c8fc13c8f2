// Decides which CUDA kernel takes a call, and how much workspace the call needs. No other code
// makes these decisions: the handlers, the workspace sizes in Python and explain() all use these
// functions.
//
// This is plain C++ that needs no GPU.
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

// Configurations of the sm_80 family, by the shared memory that a block may use, in KB: 99 on
// sm_86, sm_89 and sm_120; 163 on sm_80 and sm_87; 227 on sm_90 and sm_100. kNarrow is a
// configuration of 163 KB for head dim 192 with values of at most 128 columns.
enum class SmemClass : int32_t { kSmall = 99, kMedium = 163, kNarrow = 164, kLarge = 227 };

struct Choice {
  int32_t family = 0;           // 80 or 90: the family of the kernel
  int32_t head_dim = 0;         // the largest head dim that the instance takes
  bool general = false;         // true if the instance supports modifiers
  int32_t row = -1;             // index in sm90::kRecipes; sm_90, forward
  uint32_t only = kNoModifier;  // the one modifier that a backward kernel is made for
  bool one_kernel = false;      // sm_90, head dims above 128: one kernel computes all gradients
  SmemClass smem_class = SmemClass::kSmall;  // sm_80 only
  const char* name = "";                     // the kernel's name, for explain()
  const char* reason = "";                   // one clause: why this kernel was chosen
  int32_t queries = 0, keys = 0;             // size of a tile; 0 if not known
};

// A function that returns the head dim of the smallest instance of this build that takes the call,
// or 0. `general` asks for an instance that supports modifiers.
using FindInstance = std::function<int32_t(int32_t family, bool general)>;

// Choose a kernel. `family` is 80, 90, or 0 for the best family that the device runs. The result is
// Unimplemented if no kernel takes the call.
Status choose_forward(const Forward& params, int32_t family, const Device& device,
                      const FindInstance& find, Choice& choice);
Status choose_backward(const Backward& params, int32_t family, const Device& device,
                       const FindInstance& find, Choice& choice);

// The features of a call, besides its shape and dtype, that decide how much workspace the forward
// pass needs.
struct ForwardFeatures {
  bool segments = false, bias = false;  // true if the call has segment ids, or a bias
  bool others = false;                  // true if the call has a soft cap or dropout
  int64_t mask_matrices = 0;            // the product of the mask's batch axes and heads, or 0
  int32_t mask_rows = 0;                // T, or 1 if all queries share a row of the mask
  int64_t value_matrices = 0;           // the product of V's batch axes and heads
};

// Return the bytes that a pass needs at Forward::workspace, enough for every kernel and device. If
// the result is 0, the pointer may be null. `dtype` is that of the operands.
int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features);
int64_t forward_workspace_bytes(const Forward& params);
int64_t backward_workspace_bytes(const Shape& shape, const BackwardFeatures& features);

// Returns the number of query tiles of `rows` rows in a call.
inline int64_t query_tiles(const Shape& shape, int32_t rows) {
  return (int64_t{shape.q_len} + rows - 1) / rows * shape.heads * shape.batch;
}

// Returns whether causal order or a window limits which keys a query attends to.
inline bool banded(const Options& options) {
  return options.is_causal || options.window_left >= 0 || options.window_right >= 0;
}

}  // namespace jax_flash
