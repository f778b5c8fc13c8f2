// Implements quantize.h: plans the tiles, and launches quantize_kernel once or twice.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "quantize/kernel.cuh"
#include "quantize/quantize.h"
#include "tile/launch.cuh"

namespace jax_flash {
namespace {

// Plans an array. `shared` is the number of tokens that share a scale, or 0 if a whole set shares
// one. `tiles` counts the tiles of all arrays so far.
RoundingPlan make_plan(const Rounding& array, int64_t shared, int threads, int64_t& tiles) {
  RoundingPlan plan;
  static_cast<Rounding&>(plan) = array;
  plan.block =
      static_cast<int32_t>(std::min<int64_t>(shared > 0 ? shared : array.length, array.length));
  plan.blocks = static_cast<int32_t>(ceil_div(array.length, plan.block));
  plan.batch_per_set = shared > 0 ? 0 : static_cast<int32_t>(array.batch);
  const int64_t per_block = ceil_div(plan.block, kTileRows);
  plan.head_count = PlainDivisor(array.heads);
  plan.tiles_per_block = PlainDivisor(static_cast<int32_t>(per_block));
  plan.tiles_per_batch = PlainDivisor(static_cast<int32_t>(plan.blocks * per_block));
  plan.chunks = PlainDivisor(array.head_dim / kChunkCols);
  plan.rows_at_once = threads / plan.chunks.divisor;
  const int32_t size = array.head_dim & -array.head_dim;  // the greatest power of two in it
  plan.rotated = size / kChunkCols;
  plan.factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
  tiles += array.sets * array.batch * plan.blocks * per_block * array.heads;
  plan.end = static_cast<int32_t>(std::min<int64_t>(tiles, INT32_MAX));
  return plan;
}

// Clears the scales before atomic maxima.
Status clear_scales(const QuantizePlan& plan, int count, cudaStream_t stream) {
  for (int i = 0; i < count; ++i) {
    const RoundingPlan& array = plan.arrays[i];
    const int64_t of_set = array.batch_per_set > 0 ? 1 : array.batch * array.blocks * array.heads;
    const cudaError_t error =
        cudaMemsetAsync(array.scale, 0, static_cast<size_t>(array.sets * of_set) * 4, stream);
    if (error != cudaSuccess) {
      return Status::internal(std::string("jax_flash: cannot clear scales: ") +
                              cudaGetErrorString(error));
    }
  }
  return {};
}

template <typename Element>
Status launch(const Quantize& call, cudaStream_t stream) {
  QuantizePlan plan;
  int64_t tiles = 0;
  int widest = 0;
  for (int i = 0; i < call.count; ++i) widest = std::max(widest, call.arrays[i].head_dim);
  const int threads =
      static_cast<int>(ceil_div(kTileRows * widest, kOwnChunks * kChunkCols * 32)) * 32;
  bool in_one_step = call.block > 0;
  for (int i = 0; i < call.count; ++i) {
    plan.arrays[i] = make_plan(call.arrays[i], call.block, threads, tiles);
    in_one_step = in_one_step && plan.arrays[i].block <= kTileRows;
  }
  Shape shape;  // for error messages
  shape.batch = call.arrays[0].sets * call.arrays[0].batch;
  shape.q_len = shape.kv_len = call.arrays[0].length;
  shape.heads = shape.kv_heads = call.arrays[0].heads;
  shape.head_dim = shape.value_dim = call.arrays[0].head_dim;
  const auto run = [&](QuantizeStep step) {
    plan.step = step;
    return launch_kernel("quantize_kernel", shape, quantize_kernel<Element>, tiles, threads, 0,
                         stream, plan);
  };
  if (in_one_step) return run(QuantizeStep::kAll);
  Status status = clear_scales(plan, call.count, stream);
  if (status.ok()) status = run(QuantizeStep::kScales);
  if (status.ok()) status = run(QuantizeStep::kValues);
  return status;
}

}  // namespace

Status launch_quantize(const Quantize& call, cudaStream_t stream) {
  switch (call.dtype) {
    case DType::kFloat32: return launch<float>(call, stream);
    case DType::kBFloat16: return launch<__nv_bfloat16>(call, stream);
    default: return launch<__half>(call, stream);
  }
}

}  // namespace jax_flash
