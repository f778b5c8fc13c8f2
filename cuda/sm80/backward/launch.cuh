// Launches the backward pass of the sm_80 family, with the tile sizes for the shared memory that a
// block may use.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/added_bias_gradient.cuh"
#include "modifiers/kernels.h"
#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/choice.h"
#include "plan/modifiers.h"
#include "sm80/backward/edges.cuh"
#include "sm80/backward/kernel.cuh"
#include "sm80/backward/wide.cuh"
#include "sm80/config.cuh"
#include "sm80/decode/gradient.cuh"
#include "sm80/kernels.h"
#include "sm80/wide_config.cuh"
#include "status.h"
#include "tile/element.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm80 {

template <typename Config, typename Element, bool kGeneral>
Status launch_backward_config(const Backward& params, BackwardWorkspace workspace,
                              cudaStream_t stream) {
  const Shape& shape = params.shape;
  Status status = launch_backward_begin<Element>(params, workspace, stream);
  if (!status.ok()) return status;
  status = launch_kernel("sm80::backward_kernel", shape, backward_kernel<Config, Element, kGeneral>,
                         ceil_div(shape.kv_len, Config::kBlockKv) * shape.kv_heads * shape.batch,
                         Config::kThreads, Config::kSmemBytes, stream, params, workspace);
  if constexpr (kIsFloat32<Element>) {
    return status;
  } else {
    if (!status.ok()) return status;
    return launch_kernel("sm80::backward_end_kernel", shape,
                         backward_end_kernel<DqueryOrderOf<Config>, Element>,
                         ceil_div(shape.q_len, Config::kBlockQ) * shape.batch * shape.heads,
                         kEdgeThreads, 0, stream, params, workspace);
  }
}

// Lays out the workspace. If there are segments, launches the kernel that computes their spans.
inline Status find_workspace(const Backward& params, int64_t head_dim, BackwardWorkspace& workspace,
                             cudaStream_t stream) {
  BackwardFeatures features = BackwardFeatures::of(params);
  features.sm90 = false;
  BackwardWorkspace::plan(params.shape, head_dim, features, params.workspace, workspace);
  if (!params.query_segment_ids) return {};
  return launch_segment_spans(params, workspace.spans, stream);
}

// Launches the kernels for head dims above 256, with as many stages as fit the shared memory of a
// block.
template <typename Element, int kSmemKb>
Status launch_wide_kernels(const Backward& params, const BackwardWorkspace& workspace,
                           cudaStream_t stream) {
  using KeyConfig = WideBackwardConfig<true, kSmemKb>;
  using QueryConfig = WideBackwardConfig<false, kSmemKb>;
  const Shape& shape = params.shape;
  const bool modified = modifiers_of(params) != kNoModifier;
  const Status status = launch_kernel(
      "sm80::wide_key_kernel", shape, wide_key_kernel<KeyConfig, Element>,
      ceil_div(shape.kv_len, KeyConfig::kBlockKv) * shape.kv_heads * shape.batch,
      KeyConfig::kThreads, KeyConfig::kSmemBytes, stream, params, workspace, modified);
  if (!status.ok()) return status;
  return launch_kernel("sm80::wide_query_kernel", shape, wide_query_kernel<QueryConfig, Element>,
                       QueryTilePlace<QueryConfig::kBlockQ>::count(shape), QueryConfig::kThreads,
                       QueryConfig::kSmemBytes, stream, params, workspace, modified);
}

template <typename Element>
Status launch_wide_backward(const Backward& params, const Choice& choice, cudaStream_t stream) {
  BackwardWorkspace workspace;
  Status status = find_workspace(params, kWideDim, workspace, stream);
  if (!status.ok()) return status;
  status = launch_backward_begin<Element>(params, workspace, stream);
  if (!status.ok()) return status;
  status = choice.smem_class == SmemClass::kLarge
               ? launch_wide_kernels<Element, 227>(params, workspace, stream)
               : launch_wide_kernels<Element, 163>(params, workspace, stream);
  return status.ok() ? launch_added_gradients<Element>(params, workspace, stream) : status;
}

template <typename Element, int kHeadDim, bool kGeneral>
Status launch_backward_elements(const Backward& params, const Choice& choice, cudaStream_t stream) {
  constexpr int kNarrow = kHeadDim == 192 ? 128 : kHeadDim, kProducts = kTf32ProductsOf<Element>;
  // Tiles of float32 above head dim 128 do not fit 99 KB: choose_backward() refuses such calls.
  constexpr int kLeastKb = kIsFloat32<Element> && kHeadDim > 128 ? 163 : 99;
  using Small = BackwardConfig<kHeadDim, kHeadDim, kGeneral, kLeastKb, kProducts>;
  using Medium = BackwardConfig<kHeadDim, kHeadDim, kGeneral, 163, kProducts>;
  using Large = BackwardConfig<kHeadDim, kHeadDim, kGeneral, 227, kProducts>;
  using MediumNarrow = BackwardConfig<kHeadDim, kNarrow, kGeneral, 163, kProducts>;
  // If the tiles for more shared memory fit the smaller size, too, one instance serves both.
  using SmallOrMedium = std::conditional_t<(Medium::kSmemBytes > Small::kSmemLimit), Small, Medium>;
  using LargeOrMedium = std::conditional_t<(Large::kSmemBytes > Medium::kSmemLimit), Large, Medium>;
  BackwardWorkspace workspace;
  Status status = find_workspace(params, kHeadDim, workspace, stream);
  if (!status.ok()) return status;
  if constexpr (kGeneral && kIsFloat32<Element>) status = clear_bias_gradient(params, stream);
  if (!status.ok()) return status;
  const auto launch = [&](auto config) {
    return launch_backward_config<decltype(config), Element, kGeneral>(params, workspace, stream);
  };
  switch (choice.smem_class) {
    case SmemClass::kSmall: status = launch(SmallOrMedium{}); break;
    case SmemClass::kMedium: status = launch(Medium{}); break;
    case SmemClass::kNarrow: status = launch(MediumNarrow{}); break;
    case SmemClass::kLarge: status = launch(LargeOrMedium{}); break;
  }
  if constexpr (kGeneral) {
    if (!status.ok()) return status;
    status = launch_added_gradients<Element>(
        kIsFloat32<Element> ? without_added_bias_gradient(params) : params, workspace, stream);
  }
  return status;
}

// Launches the backward pass. kHeadDim bounds head_dim and value_dim. Head dim 192 has a
// configuration of its own for value dims of at most 128, its most frequent ones.
template <typename Element, int kHeadDim, bool kGeneral>
Status launch_backward(const Backward& params, const Choice& choice, cudaStream_t stream) {
  if constexpr (kHeadDim == kWideDim) {
    static_assert(kGeneral);
    return launch_wide_backward<Element>(params, choice, stream);
  } else {
    if constexpr (kGeneral && std::is_same_v<Element, float>) {
      if (choice.decodes) return launch_decode_gradient<kHeadDim>(params, stream);
    }
    return with_kernel_element<Element>(choice.exact, [&](auto element) {
      return launch_backward_elements<decltype(element), kHeadDim, kGeneral>(params, choice,
                                                                             stream);
    });
  }
}

}  // namespace jax_flash::sm80
