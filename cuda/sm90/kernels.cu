// Implements kernels.h, and the declaration in sm80/kernels.h for float8.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "plan/divisor.h"
#include "plan/half_values.h"
#include "plan/mask_matrices.h"
#include "sm80/decode/combine.cuh"
#include "sm90/backward/edges.cuh"
#include "sm90/backward/mask.cuh"
#include "sm90/backward/plan.cuh"
#include "sm90/forward/half_values.cuh"
#include "sm90/kernels.h"
#include "tile/element.cuh"
#include "tile/launch.cuh"
#include "tile/tensor_map.cuh"

namespace jax_flash {

template Status sm80::launch_decode_combine<Float8>(const sm80::DecodeCall&, const Forward&,
                                                    cudaStream_t);

namespace sm90 {

Status launch_half_values(const Forward& params, int64_t offset, bool dependent, int box_rows,
                          cudaStream_t stream, HalfValueMap& made) {
  const Shape& shape = params.shape;
  if (!HalfValues::takes(shape, params.value.dtype, true)) return {};
  const ValueMatrices matrices(shape, params.value);
  HalfValueCopy copy = {};
  copy.value = params.value;
  copy.kv_len = shape.kv_len;
  copy.value_dim = shape.value_dim;
  copy.heads = matrices.heads;
  copy.inner_batch = matrices.batch[1];
  copy.panels = static_cast<int32_t>(ceil_div(shape.value_dim, 64));
  // All units have about the same size. A unit of few rows could not show whether a column's values
  // are great enough.
  copy.parts = static_cast<int32_t>(ceil_div(shape.kv_len, HalfValueCopy::kRows));
  copy.rows = static_cast<int32_t>(ceil_div(shape.kv_len, copy.parts));
  const int64_t units = matrices.count() * copy.parts * copy.panels;
  if (units > INT32_MAX) return {};  // V is then read in bfloat16
  copy.units = static_cast<int32_t>(units);
  char* workspace = static_cast<char*>(params.workspace) + align_part(offset);
  copy.bad = reinterpret_cast<int32_t*>(workspace);

  Operand& half = copy.half;
  half.data = workspace + HalfValues::kMostBlocks * 4;
  half.dtype = DType::kFloat16;
  half.col = 1;
  half.head = matrices.heads > 1 ? shape.value_dim : 0;
  half.row = int64_t{matrices.heads} * shape.value_dim;
  const int64_t all_rows = half.row * shape.kv_len;
  half.batch[1] = params.value.batch[1] == 0 ? 0 : all_rows;
  half.batch[0] = params.value.batch[0] == 0 ? 0 : all_rows * matrices.batch[1];

  int sms = 0;
  if (Status status = multiprocessors(sms); !status.ok()) return status;
  constexpr int kBlocksEach = 2048 / HalfValueCopy::kThreads;
  made.blocks = std::min({copy.units, kBlocksEach * sms, HalfValues::kMostBlocks});
  made.bad = copy.bad;
  made.axes = BoxAxes(half);
  Status status = make_tensor_map("value", shape, half, shape.kv_len, matrices.heads,
                                  shape.value_dim, box_rows, made.map);
  if (!status.ok()) return status;
  return launch_grid(dependent, "sm90::half_values_kernel", shape,
                     half_values_kernel<HalfValueCopy::kThreads>, made.blocks,
                     HalfValueCopy::kThreads, 0, stream, copy);
}

template <typename Element>
Status launch_backward_begin(const Backward& params, const BackwardWorkspace& workspace,
                             const GradientScales& scales, bool sums, const ZeroPlan& zeros,
                             cudaStream_t stream) {
  const Shape& shape = params.shape;
  const int64_t tiles = ceil_div(workspace.rows, kEdgeRows);
  const auto launch = [&](auto* kernel) {
    return launch_kernel("sm90::backward_begin_kernel", shape, kernel,
                         shape.batch * shape.heads * tiles, kEdgeThreads, 0, stream,
                         BackwardEdgePlan(params, workspace, scales, tiles, sums, zeros), params);
  };
  if (shape.value_dim > 256) return launch(backward_begin_kernel<Element, 64>);
  if (shape.value_dim > 128) return launch(backward_begin_kernel<Element, 32>);
  return shape.value_dim > 64 ? launch(backward_begin_kernel<Element, 16>)
                              : launch(backward_begin_kernel<Element, 8>);
}
template Status launch_backward_begin<__nv_bfloat16>(const Backward&, const BackwardWorkspace&,
                                                     const GradientScales&, bool, const ZeroPlan&,
                                                     cudaStream_t);
template Status launch_backward_begin<__half>(const Backward&, const BackwardWorkspace&,
                                              const GradientScales&, bool, const ZeroPlan&,
                                              cudaStream_t);

Status launch_transposed_mask_words(const Backward& params, const BackwardWorkspace& workspace,
                                    TransposedMaskWords& words, cudaStream_t stream) {
  constexpr int kThreads = 256;
  const Shape& shape = params.shape;
  if (!params.mask) return {};
  words = TransposedMaskWords(shape, params.mask, workspace.mask_words);
  const int64_t blocks = words.matrices() * words.row_groups * words.key_groups;
  return launch_kernel("sm90::transposed_mask_words_kernel", shape,
                       transposed_mask_words_kernel<kThreads>, ceil_div(blocks, kThreads / 32),
                       kThreads, 0, stream, params.mask, words, shape.kv_len,
                       mask_has_vectors(params, 16), blocks, workspace.mask_words);
}

Status launch_mask_rows(const Backward& params, const BackwardWorkspace& workspace,
                        MaskRows& mask_rows, cudaStream_t stream) {
  constexpr int32_t kLeastRows = 1024;
  const Shape& shape = params.shape;
  if (!params.mask) return {};
  MaskRows made(shape, params.mask);
  // A mask with one row is read in no time.
  const bool pays = made.rows == 1 && query_tiles(shape, MaskRows::kKeys) >= 4 * 132;
  if (shape.q_len < kLeastRows && !pays) return {};
  if (!made.shared(shape) || made.bytes() > workspace.split_sums_bytes) return {};
  int2* const ranges = reinterpret_cast<int2*>(workspace.split_sums);
  made.ranges = ranges;
  mask_rows = made;
  return launch_kernel("sm90::mask_rows_kernel", shape, mask_rows_kernel<kMaskRowsThreads>,
                       made.matrices() * made.tiles, kMaskRowsThreads, 0, stream, params.mask, made,
                       shape.kv_len, mask_has_vectors(params, 4), ranges);
}

}  // namespace sm90
}  // namespace jax_flash
