// Launches the forward pass of float32 operands on Hopper.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/choice.h"
#include "plan/float32_tiles.h"
#include "sm90/float32_products.cuh"
#include "sm90/float32_tiles.cuh"
#include "sm90/forward/schedule.cuh"
#include "sm90/forward_float32/config.cuh"
#include "sm90/forward_float32/kernel.cuh"
#include "sm90/forward_float32/plan.cuh"
#include "sm90/split_tiles.cuh"
#include "status.h"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

template <typename Config, bool kGeneral>
Status launch_forward_tiles(const Forward& params, cudaStream_t stream) {
  constexpr bool kSplit = Config::kSplit;
  const Shape& shape = params.shape;
  const int64_t q_tiles = ceil_div(shape.q_len, Config::kBlockQ);
  Float32Tiles workspace;
  Float32Tiles::plan(shape, kSplit, params.workspace, workspace);
  AllTiles tiles(params);
  tiles.add(shape, params.key, false, shape.head_dim, workspace.tiles, workspace.key, nullptr,
            workspace.bits);
  TilesOf& value = tiles.add(shape, params.value, false, shape.value_dim, workspace.tiles, nullptr,
                             workspace.value);
  if (kGeneral) {  // a modifier may hide a key from some queries only: their P is 0
    value.clears = true;
    value.bad = workspace.bad;
  }
  tiles.counter = workspace.counter;
  Status status = launch_tiles<kSplit, Config::kBlockKv, Config::kHeadDim>(params, tiles, stream);
  int sms = 0;
  if (status.ok()) status = multiprocessors(sms);
  if (!status.ok()) return status;
  QueryTileSchedule schedule(shape, static_cast<int32_t>(q_tiles),
                             params.options.is_causal && q_tiles * shape.heads * shape.batch > sms);
  // As in sm90/forward/launch.cuh, but TF32 takes twice the time of 16 bits, and split products
  // take three times.
  const bool is_long =
      int64_t{shape.kv_len} * Config::kHeadDim >= JAX_FLASH_SM90_LONG_UNIT / (kSplit ? 3 : 2);
  const bool in_turn = schedule.divide(sms, is_long);
  const Float32Plan plan(params, schedule, in_turn, workspace, kGeneral);
  // The kernel begins while tiles are still being written (griddepcontrol).
  return with_float32_modifiers<kGeneral>(params, [&](auto modifiers) {
    return launch_grid(true, "sm90::forward_float32_kernel", shape,
                       forward_float32_kernel<Config, modifiers.value>, schedule.grid(),
                       Config::kThreads, Config::kSmemBytes, stream, plan, params);
  });
}

template <int kHeadDim, bool kGeneral>
Status launch_forward_float32(const Forward& params, const Choice& choice, cudaStream_t stream) {
  if constexpr (kGeneral && kHeadDim <= kMaxSplitHeadDim) {
    if (choice.exact) {
      return launch_forward_tiles<Float32Config<kHeadDim, true>, kGeneral>(params, stream);
    }
  }
  return launch_forward_tiles<Float32Config<kHeadDim, false>, kGeneral>(params, stream);
}

}  // namespace jax_flash::sm90
