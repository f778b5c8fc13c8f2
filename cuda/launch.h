// Runs the forward or backward pass on an NVIDIA GPU. The custom calls and the Python module use
// this interface.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "plan/choose.h"
#include "plan/float8.h"
#include "status.h"

namespace jax_flash::cuda {

// Enqueue a pass on `stream` of the current device. The host neither allocates memory nor waits nor
// reads device memory, and it enqueues the same kernels for the same shapes and options. XLA can
// therefore record the call into a command buffer. `family` is 80, 90, or 0 for the best family
// that the device runs. `scales` are those of float8 operands.
//
// The result is Unimplemented if no kernel takes the call: for axes without elements, for too many
// queries and keys together (kMaxTotalLength in plan/choose.cc), for head dims that are too large
// or, unless the operands are float32, not multiples of 8 (float8: 16). It is InvalidArgument if
// query, key, value, out or one of their gradients, unless it is float32, has an address or a
// stride that is not a multiple of 16 bytes.
Status forward(const Forward& params, const Scales& scales, int family, cudaStream_t stream);
Status backward(const Backward& params, int family, cudaStream_t stream);

// Choose the kernel of this build that takes a call on a device.
Status choose(const Forward& params, int family, const Device& device, Choice& choice);
Status choose(const Backward& params, int family, const Device& device, Choice& choice);

}  // namespace jax_flash::cuda
