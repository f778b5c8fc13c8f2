// Runs the operation on an NVIDIA GPU: what the custom calls and the Python module see of it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "plan/choose.h"
#include "status.h"

namespace jax_flash::cuda {

// Enqueue the pass on `stream` of the current device. They allocate nothing, read no device
// memory, wait for nothing, and enqueue the same kernels for the same shapes and options.
// `family` is 0 for the best that the device runs, or 80 or 90.
//
// float32 operands, head dims that are no multiple of 8 or above 256, and axes without elements, of
// which no kernel makes anything, are Unimplemented.
// Pointers of the operands of matrix products are multiples of 16 bytes, as are their strides.
Status forward(const Forward& params, int family, cudaStream_t stream);
Status backward(const Backward& params, int family, cudaStream_t stream);

// The kernel that a call gets on a device, of those that this build has.
Status choose(const Forward& params, int family, const Device& device, Choice& choice);
Status choose(const Backward& params, int family, const Device& device, Choice& choice);

}  // namespace jax_flash::cuda
