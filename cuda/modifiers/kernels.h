// Declares launches of the modifiers' kernels that do not depend on the head dim. Both families use
// them. They are compiled once, in kernels.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/segment_spans.h"
#include "status.h"

namespace jax_flash {

// Computes the spans of both kinds of segment ids, or of those that a mask of keys becomes.
Status launch_segment_spans(const Forward& params, const SegmentSpans& spans, cudaStream_t stream);

// Computes the gradients of a bias, ALiBi slopes and a relative bias, if the call has them as
// outputs. Element: the type of query, key and value.
template <typename Element>
Status launch_added_gradients(const Backward& params, const BackwardWorkspace& workspace,
                              cudaStream_t stream);

}  // namespace jax_flash
