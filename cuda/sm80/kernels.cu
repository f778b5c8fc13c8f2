// Implements kernels.h.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sm80/backward/edges.cuh"
#include "sm80/decode/combine.cuh"
#include "sm80/decode/dquery.cuh"
#include "sm80/kernels.h"
#include "tile/element.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm80 {

template <typename Element>
Status launch_backward_begin(const Backward& params, const BackwardWorkspace& workspace,
                             cudaStream_t stream) {
  const Shape& shape = params.shape;
  return launch_kernel("sm80::backward_begin_kernel", shape, backward_begin_kernel<Element>,
                       ceil_div(shape.q_len, kMaxBlockQ) * shape.batch * shape.heads, kEdgeThreads,
                       0, stream, params, workspace);
}

Status launch_decode_dquery(const DecodeCall& call, const Backward& params, cudaStream_t stream) {
  return launch_dependent("sm80::decode_dquery_kernel", params.shape, decode_dquery_kernel,
                          int64_t{call.parts.units.divisor}, kDqueryWarps * 32, 0, stream, call,
                          params);
}

template Status launch_decode_combine<__nv_bfloat16>(const DecodeCall&, const Forward&,
                                                     cudaStream_t);
template Status launch_decode_combine<__half>(const DecodeCall&, const Forward&, cudaStream_t);
template Status launch_decode_combine<Tf32>(const DecodeCall&, const Forward&, cudaStream_t);
template Status launch_decode_combine<Tf32x3>(const DecodeCall&, const Forward&, cudaStream_t);
template Status launch_backward_begin<__nv_bfloat16>(const Backward&, const BackwardWorkspace&,
                                                     cudaStream_t);
template Status launch_backward_begin<__half>(const Backward&, const BackwardWorkspace&,
                                              cudaStream_t);
template Status launch_backward_begin<Tf32>(const Backward&, const BackwardWorkspace&,
                                            cudaStream_t);
template Status launch_backward_begin<Tf32x3>(const Backward&, const BackwardWorkspace&,
                                              cudaStream_t);

}  // namespace jax_flash::sm80
