// Declares launches of Hopper's kernels that depend neither on the head dim nor on the modifiers.
// They are compiled once, in kernels.cu.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "status.h"

namespace jax_flash::sm90 {

struct GradientScales;
struct HalfValueMap;
struct MaskRows;
struct TransposedMaskWords;
struct ZeroPlan;

// Converts V to float16 in the workspace, from `offset` on, if the call is suited to it.
// `dependent`: an earlier kernel is part of the same call. `box_rows`: keys of a tile.
Status launch_half_values(const Forward& params, int64_t offset, bool dependent, int box_rows,
                          cudaStream_t stream, HalfValueMap& made);

// Launches the begin kernel of backward/edges.cuh. `sums`: true if the main kernel adds to sums in
// device memory, which `zeros` divides.
template <typename Element>
Status launch_backward_begin(const Backward& params, const BackwardWorkspace& workspace,
                             const GradientScales& scales, bool sums, const ZeroPlan& zeros,
                             cudaStream_t stream);

// If there is a mask, computes its bits for the backward pass (backward/mask.cuh).
Status launch_transposed_mask_words(const Backward& params, const BackwardWorkspace& workspace,
                                    TransposedMaskWords& words, cudaStream_t stream);

// Launches mask_rows_kernel where it saves time. If few heads share a mask, reading it takes longer
// than the skipped tiles save, and in short calls the launch itself does. The ranges reuse the
// memory for sums of divided key blocks, which calls with a mask do not have.
Status launch_mask_rows(const Backward& params, const BackwardWorkspace& workspace,
                        MaskRows& mask_rows, cudaStream_t stream);

}  // namespace jax_flash::sm90
