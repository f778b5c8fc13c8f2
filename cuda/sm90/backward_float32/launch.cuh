// Launches the backward pass of float32 operands on Hopper: a kernel for tiles of the operands, and
// delta and lse, one for dK and dV, and one for dQ.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/choice.h"
#include "plan/float32_tiles.h"
#include "sm90/backward_float32/key_kernel.cuh"
#include "sm90/backward_float32/query_kernel.cuh"
#include "sm90/float32_tiles.cuh"
#include "status.h"
#include "tile/block_place.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

template <int kHeadDim, bool kGeneral>
Status launch_backward_float32(const Backward& params, const Choice&, cudaStream_t stream) {
  static_assert(!kGeneral);
  using KeyConfig = Float32KeyConfig<kHeadDim>;
  using QueryConfig = Float32QueryConfig<kHeadDim>;
  const Shape& shape = params.shape;
  BackwardWorkspace workspace;
  const BackwardFeatures features = BackwardFeatures::of(params);
  const int64_t bytes =
      BackwardWorkspace::plan(shape, kHeadDim, features, params.workspace, workspace);
  Float32Gradient tiles;
  Float32Gradient::plan(shape, static_cast<char*>(params.workspace) + bytes, tiles);
  AllTiles all;
  const int32_t dim = shape.head_dim, value_dim = shape.value_dim;
  all.add(shape, params.dout, true, value_dim, tiles.query_tiles, tiles.dout,
          tiles.dout_transposed);
  all.dout = 0;
  all.statistics = GradientStatistics(params, workspace);
  all.add(shape, params.query, true, dim, tiles.query_tiles, tiles.query, tiles.query_transposed);
  all.add(shape, params.key, false, dim, tiles.key_tiles, tiles.key, tiles.key_transposed,
          tiles.bits);
  all.add(shape, params.value, false, value_dim, tiles.key_tiles, tiles.value, nullptr);
  Status status = launch_float32_tiles<Float32Gradient::kTileRows, kHeadDim>(params, all, stream);
  if (status.ok()) {
    status =
        launch_kernel("sm90::float32_key_kernel", shape, float32_key_kernel<KeyConfig>,
                      ceil_div(shape.kv_len, KeyConfig::kOwnRows) * shape.kv_heads * shape.batch,
                      KeyConfig::kThreads, KeyConfig::kSmemBytes, stream, params, workspace, tiles);
  }
  if (!status.ok()) return status;
  return launch_kernel("sm90::float32_query_kernel", shape, float32_query_kernel<QueryConfig>,
                       QueryTilePlace<QueryConfig::kOwnRows>::count(shape), QueryConfig::kThreads,
                       QueryConfig::kSmemBytes, stream, params, workspace, tiles);
}

}  // namespace jax_flash::sm90
