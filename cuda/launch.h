// Runs the operation on an NVIDIA GPU. The custom calls and the Python module use this interface.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "plan/choose.h"
#include "plan/float8.h"
#include "status.h"

namespace jax_flash::cuda {

// Enqueue the pass on `stream` of the current device. They allocate nothing, read no device memory,
// wait for nothing, and enqueue the same kernels for the same shapes and options. `family` is 0 for
// the best that the device runs, or 80 or 90.
//
// The result is Unimplemented for float32 operands, for head dims that are not multiples of 8 or
// exceed 256, and for axes without elements, which no kernel handles. Operands of matrix products
// must have pointers and strides that are multiples of 16 bytes. `scales`: those of float8
// operands.
Status forward(const Forward& params, const Scales& scales, int family, cudaStream_t stream);
Status backward(const Backward& params, int family, cudaStream_t stream);

// Returns the kernel that a call gets on a device, among those in this build.
Status choose(const Forward& params, int family, const Device& device, Choice& choice);
Status choose(const Backward& params, int family, const Device& device, Choice& choice);

}  // namespace jax_flash::cuda
