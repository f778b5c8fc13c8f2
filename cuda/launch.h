// The operation on an NVIDIA GPU, as the custom calls see it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "status.h"

namespace jax_flash::cuda {

// Enqueue the pass on `stream` of the current device. They allocate nothing, read no device
// memory, wait for nothing, and enqueue the same kernels for the same shapes and options.
// `family` is 0 for the best that the device runs, or 80.
//
// float32 operands, head dims that are no multiple of 8 or above 256, and axes without elements, of
// which no kernel makes anything, are Unimplemented.
// Pointers of the operands of matrix products are multiples of 16 bytes, as are their strides.
Status forward(const Forward& params, int family, cudaStream_t stream);
Status backward(const Backward& params, int family, cudaStream_t stream);

// What of a call, besides its shape and dtype, decides how much workspace the forward pass needs.
struct ForwardFeatures {
  bool segments = false, bias = false;  // whether it has segment ids, or a bias
  bool others = false;                  // a soft cap, or dropout
  int64_t mask_matrices = 0;            // the product of the mask's batch axes and heads, or 0
  int32_t mask_rows = 0;                // its T, or 1
  int64_t value_matrices = 0;           // the product of V's batch axes and heads
};

// Bytes that the passes need at `workspace`; 0: it may be null. `dtype`: the operands'.
int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features);
int64_t forward_workspace_bytes(const Forward& params);
int64_t backward_workspace_bytes(const Shape& shape, bool segments, bool deterministic);

}  // namespace jax_flash::cuda
