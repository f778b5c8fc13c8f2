// Launches the backward pass of float32 operands on Hopper: a kernel for tiles of the operands, and
// delta and lse, one for dK and dV, one that adds parts of these if there are any, one for dQ, and
// those for gradients of what is added to logits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/added_bias_gradient.cuh"
#include "modifiers/kernels.h"
#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/choice.h"
#include "plan/float32_tiles.h"
#include "sm90/backward_float32/key_kernel.cuh"
#include "sm90/backward_float32/query_kernel.cuh"
#include "sm90/float32_products.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/split_tiles.cuh"
#include "status.h"
#include "tile/block_place.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

// Computes dK and dV.
template <typename Config, uint32_t kModifiers>
Status launch_float32_keys(const Backward& params, const BackwardWorkspace& workspace,
                           const Float32Gradient& tiles, cudaStream_t stream) {
  static_assert(Config::kOwnRows == Float32Gradient::kBlockKeys);
  constexpr int kSumThreads = 256;
  const Shape& shape = params.shape;
  const int64_t heads = shape.kv_heads * shape.batch;
  const Status status = launch_kernel(
      "sm90::float32_key_kernel", shape, float32_key_kernel<Config, kModifiers>,
      ceil_div(shape.kv_len, Config::kOwnRows) * heads * tiles.parts * Config::kBlocks,
      Config::kThreads, Config::kSmemBytes, stream, params, workspace, tiles);
  if (!status.ok() || tiles.parts == 1) return status;
  return launch_kernel("sm90::float32_key_sums_kernel", shape, float32_key_sums_kernel<kSumThreads>,
                       ceil_div(heads * shape.kv_len, kSumThreads / 32), kSumThreads, 0, stream,
                       params, tiles);
}

template <int kHeadDim, bool kGeneral, bool kSplit>
Status launch_backward_tiles(const Backward& params, cudaStream_t stream) {
  using KeyConfig = Float32KeyConfig<kHeadDim, kSplit>;
  using QueryConfig = Float32QueryConfig<kHeadDim, kSplit>;
  const Shape& shape = params.shape;
  BackwardWorkspace workspace;
  const BackwardFeatures features = BackwardFeatures::of(params);
  const int64_t bytes =
      BackwardWorkspace::plan(shape, kHeadDim, features, params.workspace, workspace);
  Float32Gradient tiles;
  Float32Gradient::plan(shape, kSplit, static_cast<char*>(params.workspace) + bytes, tiles);
  AllTiles all(params);
  const int32_t dim = shape.head_dim, value_dim = shape.value_dim;
  all.add(shape, params.dout, true, value_dim, tiles.query_tiles, tiles.dout,
          tiles.dout_transposed);
  all.dout = 0;
  all.statistics = GradientStatistics(params, workspace);
  all.add(shape, params.query, true, dim, tiles.query_tiles, tiles.query, tiles.query_transposed);
  TilesOf& key = all.add(shape, params.key, false, dim, tiles.key_tiles, tiles.key,
                         tiles.key_transposed, tiles.bits);
  // A key that a modifier hides from a query has dS = 0, whose product with NaN would be NaN. A
  // query that does attend to a NaN has dS = NaN.
  key.clears = kGeneral;
  all.add(shape, params.value, false, value_dim, tiles.key_tiles, tiles.value, nullptr);
  constexpr int kRows = Float32Gradient::kTileRows;
  constexpr int kCols = QueryConfig::kHeadDim, kBlocks = QueryConfig::kBlocks;
  Status status = launch_tiles<kSplit, kRows, kCols, kBlocks>(params, all, stream);
  if (kGeneral && status.ok()) status = clear_bias_gradient(params, stream);
  if (!status.ok()) return status;
  status = with_float32_modifiers<kGeneral>(params, [&](auto modifiers) {
    const Status of_keys =
        launch_float32_keys<KeyConfig, modifiers.value>(params, workspace, tiles, stream);
    if (!of_keys.ok()) return of_keys;
    return launch_kernel(
        "sm90::float32_query_kernel", shape, float32_query_kernel<QueryConfig, modifiers.value>,
        QueryTilePlace<QueryConfig::kOwnRows>::count(shape) * QueryConfig::kBlocks,
        QueryConfig::kThreads, QueryConfig::kSmemBytes, stream, params, workspace, tiles);
  });
  if (!kGeneral || !status.ok()) return status;
  using Element = std::conditional_t<kSplit, Tf32x3, Tf32>;
  return launch_added_gradients<Element>(without_added_bias_gradient(params), workspace, stream);
}

template <int kHeadDim, bool kGeneral>
Status launch_backward_float32(const Backward& params, const Choice& choice, cudaStream_t stream) {
  if constexpr (kGeneral && kHeadDim <= kMaxSplitHeadDim) {
    if (choice.exact) return launch_backward_tiles<kHeadDim, kGeneral, true>(params, stream);
  }
  return launch_backward_tiles<kHeadDim, kGeneral, false>(params, stream);
}

}  // namespace jax_flash::sm90
