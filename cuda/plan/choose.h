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
#include "plan/choice.h"
#include "status.h"

namespace jax_flash {

// The properties of a GPU that a choice depends on.
struct Device {
  int32_t capability = 0;       // 90 for compute capability 9.0
  int32_t multiprocessors = 0;  // the number of multiprocessors
  int32_t smem_bytes = 0;       // the most shared memory that a block may use
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
  bool exact = false;                   // true if products are as exact as those of float32
};

// Return the bytes that a pass needs at Forward::workspace, enough for every kernel and device. If
// the result is 0, the pointer may be null. `dtype` is that of the operands.
int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features);
int64_t forward_workspace_bytes(const Forward& params);
int64_t backward_workspace_bytes(const Shape& shape, const BackwardFeatures& features);

}  // namespace jax_flash
