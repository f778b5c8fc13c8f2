// Launches the forward pass of the sm_80 family, with the tile sizes for the shared memory that a
// block may use.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "modifiers/kernels.h"
#include "params.h"
#include "plan/choice.h"
#include "plan/modifiers.h"
#include "sm80/config.cuh"
#include "sm80/decode/kernel.cuh"
#include "sm80/forward/kernel.cuh"
#include "sm80/forward/wide.cuh"
#include "sm80/wide_config.cuh"
#include "status.h"
#include "tile/element.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm80 {

template <typename Config, typename Element, bool kGeneral>
Status launch_forward_config(const Forward& params, const SegmentSpans& spans,
                             cudaStream_t stream) {
  int64_t blocks = QueryTilePlace<Config::kBlockQ>::count(params.shape);
  if (params.extreme_rows_only) {  // usually finds few tiles or none, so blocks are persistent
    int sms = 0;
    if (const Status status = multiprocessors(sms); !status.ok()) return status;
    blocks = std::min<int64_t>(blocks, int64_t{sms} * Config::kMinBlocks);
  }
  return launch_grid(params.extreme_rows_only, "sm80::forward_kernel", params.shape,
                     forward_kernel<Config, Element, kGeneral>, blocks, Config::kThreads,
                     Config::kSmemBytes, stream, params, spans);
}

// If there are segments, finds their spans in the workspace and launches the kernel that computes
// the spans.
inline Status find_segment_spans(const Forward& params, SegmentSpans& spans, cudaStream_t stream) {
  if (!params.query_segment_ids) return {};
  spans = SegmentSpans::at(params.shape, params.workspace);
  if (params.extreme_rows_only) return {};  // the pass before has computed them
  return launch_segment_spans(params, spans, stream);
}

// Launches the kernel for head dims above 256, with the largest tiles that fit the shared memory of
// a block.
template <typename Element>
Status launch_wide_forward(const Forward& params, const Choice& choice, cudaStream_t stream) {
  SegmentSpans spans;
  if (const Status status = find_segment_spans(params, spans, stream); !status.ok()) return status;
  const auto launch = [&](auto config) {
    using Config = decltype(config);
    return launch_kernel(
        "sm80::wide_forward_kernel", params.shape, wide_forward_kernel<Config, Element>,
        QueryTilePlace<Config::kBlockQ>::count(params.shape), Config::kThreads, Config::kSmemBytes,
        stream, params, spans, modifiers_of(params) != kNoModifier);
  };
  switch (choice.smem_class) {
    case SmemClass::kSmall: return launch(WideForwardConfig<99>{});
    case SmemClass::kLarge: return launch(WideForwardConfig<227>{});
    default: return launch(WideForwardConfig<163>{});
  }
}

template <typename Element, int kHeadDim, bool kGeneral>
Status launch_forward_elements(const Forward& params, const Choice& choice, cudaStream_t stream) {
  SegmentSpans spans;
  if (const Status status = find_segment_spans(params, spans, stream); !status.ok()) return status;
  constexpr int kNarrow = kHeadDim == 192 ? 128 : kHeadDim, kProducts = kTf32ProductsOf<Element>;
  if constexpr (std::is_same_v<Element, Tf32> && kHeadDim <= 128) {
    int sms = 0;
    if (const Status status = multiprocessors(sms); !status.ok()) return status;
    if (query_tiles(params.shape, 128) < sms) {
      return launch_forward_config<ForwardConfig<kHeadDim, kHeadDim, kGeneral, 99, kProducts, true>,
                                   Element, kGeneral>(params, spans, stream);
    }
  }
  if constexpr (kIsFloat32<Element> && kHeadDim > 128) {
    if (choice.smem_class == SmemClass::kLarge) {
      return launch_forward_config<ForwardConfig<kHeadDim, kHeadDim, kGeneral, 227, kProducts>,
                                   Element, kGeneral>(params, spans, stream);
    }
  }
  using Small = ForwardConfig<kHeadDim, kHeadDim, kGeneral, 99, kProducts>;
  using Medium = ForwardConfig<kHeadDim, kHeadDim, kGeneral, 163, kProducts>;
  // If the tiles for 163 KB fit 99 KB, too, one instance serves both.
  using SmallOrMedium = std::conditional_t<(Medium::kSmemBytes > Small::kSmemLimit), Small, Medium>;
  if (choice.smem_class == SmemClass::kSmall) {
    return launch_forward_config<SmallOrMedium, Element, kGeneral>(params, spans, stream);
  }
  if constexpr (kNarrow < kHeadDim) {
    if (choice.smem_class == SmemClass::kNarrow) {
      return launch_forward_config<ForwardConfig<kHeadDim, kNarrow, kGeneral, 163, kProducts>,
                                   Element, kGeneral>(params, spans, stream);
    }
  }
  return launch_forward_config<Medium, Element, kGeneral>(params, spans, stream);
}

// Launches the forward pass. kHeadDim bounds head_dim and value_dim. Head dim 192 has a
// configuration of its own for value dims of at most 128, its most frequent ones.
template <typename Element, int kHeadDim, bool kGeneral>
Status launch_forward(const Forward& params, const Choice& choice, cudaStream_t stream) {
  if constexpr (kHeadDim == kWideDim) {
    static_assert(kGeneral);
    return launch_wide_forward<Element>(params, choice, stream);
  } else {
    if constexpr (kGeneral && std::is_same_v<Element, float>) {
      if (choice.decodes && has_one_row(params.shape)) {
        return launch_decode<Float32, kHeadDim>(params, stream);
      }
    }
    return with_kernel_element<Element>(choice.exact, [&](auto element) {
      if constexpr (kGeneral) {
        if (choice.decodes) return launch_decode<decltype(element), kHeadDim>(params, stream);
      }
      return launch_forward_elements<decltype(element), kHeadDim, kGeneral>(params, choice, stream);
    });
  }
}

}  // namespace jax_flash::sm80
