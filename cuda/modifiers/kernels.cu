// Implements kernels.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "modifiers/bias_gradient.cuh"
#include "modifiers/kernels.h"
#include "modifiers/segments.cuh"
#include "tile/launch.cuh"

namespace jax_flash {

Status launch_segment_spans(const Forward& params, const SegmentSpans& spans, cudaStream_t stream) {
  const int64_t warps = params.shape.batch * (int64_t{spans.query_blocks} + spans.key_blocks);
  return launch_kernel(
      "segment_spans_kernel", params.shape, segment_spans_kernel<kSegmentSpansThreads>,
      ceil_div(warps, kSegmentSpansThreads / 32), kSegmentSpansThreads, 0, stream, params, spans);
}

template <typename Element>
Status launch_bias_gradient(const Backward& params, const BackwardWorkspace& workspace,
                            cudaStream_t stream) {
  const BiasOwnership ownership(params.shape, params.dbias);
  return launch_kernel("bias_gradient_kernel", params.shape, bias_gradient_kernel<Element>,
                       ownership.blocks(), kBiasThreads, 2 * BiasOperandTile::kBytes, stream,
                       params, workspace, ownership);
}
template Status launch_bias_gradient<__nv_bfloat16>(const Backward&, const BackwardWorkspace&,
                                                    cudaStream_t);
template Status launch_bias_gradient<__half>(const Backward&, const BackwardWorkspace&,
                                             cudaStream_t);

}  // namespace jax_flash
