// Declares launches of the sm_80 family's kernels that do not depend on the head dim. They are
// compiled once, in kernels.cu; those of float8, which only Hopper decodes, in sm90/kernels.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "plan/backward_workspace.h"
#include "status.h"

namespace jax_flash::sm80 {

struct DecodeCall;

// Launches decode/combine.cuh, after the decoding kernel.
template <typename Element>
Status launch_decode_combine(const DecodeCall& call, const Forward& params, cudaStream_t stream);

// Launches decode/dquery.cuh, after the kernel of decode/gradient.cuh.
Status launch_decode_dquery(const DecodeCall& call, const Backward& params, cudaStream_t stream);

// Launches the kernel of backward/edges.cuh that runs before the main kernel.
template <typename Element>
Status launch_backward_begin(const Backward& params, const BackwardWorkspace& workspace,
                             cudaStream_t stream);

}  // namespace jax_flash::sm80
