// Implements kernels.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "modifiers/bias_gradient.cuh"
#include "modifiers/distance_gradient.cuh"
#include "modifiers/kernels.h"
#include "modifiers/segments.cuh"
#include "tile/element.cuh"
#include "tile/launch.cuh"

namespace jax_flash {

Status launch_segment_spans(const Forward& params, const SegmentSpans& spans, cudaStream_t stream) {
  const int64_t warps = params.shape.batch * (int64_t{spans.query_blocks} + spans.key_blocks);
  return launch_kernel(
      "segment_spans_kernel", params.shape, segment_spans_kernel<kSegmentSpansThreads>,
      ceil_div(warps, kSegmentSpansThreads / 32), kSegmentSpansThreads, 0, stream, params, spans);
}

Status launch_bias_parts(const Backward& params, const BiasParts& parts, cudaStream_t stream) {
  if (parts.parts == 1) return {};
  return launch_kernel("bias_parts_kernel", params.shape, bias_parts_kernel<kGradientThreads>,
                       ceil_div(parts.elements, kGradientThreads), kGradientThreads, 0, stream,
                       params.dbias, parts);
}

template <typename Element>
Status launch_added_gradients(const Backward& params, const BackwardWorkspace& workspace,
                              cudaStream_t stream) {
  const Shape& shape = params.shape;
  Status status;
  if (params.dbias) {
    const BiasOwnership ownership(shape, params.dbias);
    const BiasParts parts(params, workspace, ownership, ownership.summed_tiles(),
                          kBiasGradientBlocks);
    status = launch_kernel("bias_gradient_kernel", shape, bias_gradient_kernel<Element>,
                           ownership.blocks() * parts.parts, kGradientThreads,
                           kGradientSmemBytes<Element>, stream, parts.of(params), workspace,
                           ownership, parts);
    if (status.ok()) status = launch_bias_parts(params, parts, stream);
  }
  if (!status.ok() || distance_floats(params) == 0) return status;
  const int64_t heads = shape.batch * shape.heads;
  status = launch_kernel("distance_gradient_kernel", shape, distance_gradient_kernel<Element>,
                         heads * BackwardWorkspace::tile_diagonals(shape), kGradientThreads,
                         kGradientSmemBytes<Element>, stream, params, workspace);
  if (!status.ok()) return status;
  return launch_kernel("distance_sums_kernel", shape, distance_sums_kernel<kGradientThreads>, heads,
                       kGradientThreads, 0, stream, params, workspace);
}
template Status launch_added_gradients<__nv_bfloat16>(const Backward&, const BackwardWorkspace&,
                                                      cudaStream_t);
template Status launch_added_gradients<__half>(const Backward&, const BackwardWorkspace&,
                                               cudaStream_t);
template Status launch_added_gradients<Tf32>(const Backward&, const BackwardWorkspace&,
                                             cudaStream_t);
template Status launch_added_gradients<Tf32x3>(const Backward&, const BackwardWorkspace&,
                                               cudaStream_t);

}  // namespace jax_flash
