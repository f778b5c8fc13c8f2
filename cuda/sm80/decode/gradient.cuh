// Computes the backward pass of calls whose key/value heads have a single query row of float32,
// with any modifiers but dropout, and without gradients of what is added to logits. With q, o and
// do of the row, for each key:
//
//   p = exp(scale q.k - lse),  ds = p (do.v - delta)     delta = do.o - dlse
//   dv = p do,  dk = scale ds q,  dq += scale ds k
//
// Memory bounds this pass, which reads or writes each number once. Blocks divide the keys of a unit
// into parts as in kernel.cuh. Here the parts cover all keys, since those that the row does not
// attend to get zeros. A second kernel adds up dq of the parts.
//
// Shared memory: q and do | kStages tiles of K | kStages tiles of V; at the end, the warps' dq.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "modifiers/logits.cuh"
#include "modifiers/score_gradient.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/decode_sm80.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "sm80/decode/call.cuh"
#include "sm80/decode/kernel.cuh"
#include "sm80/decode/one_row.cuh"
#include "sm80/kernels.h"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/element.cuh"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// Holds what the gradients of a row depend on. [0][1] is for the fragments' second row, which does
// not exist: lse is +inf, as for a row without keys.
struct RowStatistics {
  float lse[1][2] = {{-minus_infinity(), -minus_infinity()}};  // in the units of the logits
  float delta[1][2] = {};
  float correction = 1.0f;  // of P, because lse in log2 units is rounded once more

  __device__ __forceinline__ RowStatistics(const Backward& params, const BatchIndex& batch,
                                           int32_t head) {
    const float* out = batch.pointer<const float>(params.out, head);
    const float* dout = batch.pointer<const float>(params.dout, head);
    float sum = 0.0f;
    for (int32_t col = threadIdx.x % 32; col < params.shape.value_dim; col += 32) {
      sum = fmaf(out[col], dout[col], sum);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    const float row_lse = *batch.pointer<const float>(params.lse, head);
    if (row_lse == minus_infinity()) return;
    const float log2 = row_lse * kLog2E;
    lse[0][0] = in_natural_units(params) ? row_lse : log2;
    correction = ptx::ex2_approx_ftz(fmaf(-row_lse, kLog2E, log2));
    delta[0][0] = params.dlse ? sum - *batch.pointer<const float>(params.dlse, head) : sum;
  }
};

// Stores `factors` times a row that is in shared memory, one for each of the lane's keys. A factor
// of 0 gives zeros, also if the row, which may then attend to nothing, is NaN.
template <int kN, typename Tile>
__device__ __forceinline__ void store_multiples(const Operand& operand, float* gradient,
                                                int32_t cols, int32_t key0, int32_t kv_len,
                                                const float (&factors)[1][kN][4], const Tile& row) {
  const bool aligned =
      reinterpret_cast<uintptr_t>(gradient) % 16 == 0 && operand.row % 4 == 0 && cols % 4 == 0;
  const int lane = threadIdx.x % 32, group = lane / 4;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    const int32_t col = panel * 32 + group * 4;
    if (col >= cols) continue;
    const float4 x = ptx::ld_shared_v4_f32(row.address(0, panel * 8 + group));
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      const int32_t key = key0 + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (key >= kv_len) continue;
      const float factor = factors[0][i / 2][i % 2];
      float values[4] = {factor * x.x, factor * x.y, factor * x.z, factor * x.w};
      if (factor == 0.0f) values[0] = values[1] = values[2] = values[3] = 0.0f;
      float* to = gradient + key * operand.row + col;
      if (aligned) {
        *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (col + e < cols) to[e] = values[e];
        }
      }
    }
  }
}

// Computes the gradients of a part of a unit's keys.
template <typename Config>
struct OneRowGradient {
  static constexpr int kN = Config::kWarpKeys / 8;
  using Loop = DecodeLoop<Config, Float32>;
  using Factors = float[1][kN][4];
  const Loop& loop;
  const Backward& params;
  const BatchIndex& batch;
  const LogitModifiers& modifiers;
  const RowStatistics& row;
  int32_t head;

  // Returns do, which is behind q in each panel of their tile.
  __device__ __forceinline__ typename Config::QueryTile dout_smem() const {
    return {loop.query_smem.root, 128};
  }
  // Sets p and ds of the warp's keys from col0 on. Returns bit 2 n + e for keys that the row
  // attends to, as attended_columns() does: others have p = ds = 0, whatever lse and dP are.
  __device__ __forceinline__ uint32_t differentiate(Factors& p, Factors& ds, int32_t col0,
                                                    int stage,
                                                    const RowElements<kN>& elements) const {
    multiply_one_row(p, loop.query_smem, loop.of_warp(loop.tile_smem(stage, 0)));
    if (loop.call.modified) {
      modifiers.apply_row(p[0], 0, loop.band, 0, col0, elements);
    } else {
      LogitModifiers::apply_band(p[0], 0, loop.band, 0, col0, params.options.scale);
    }
    const uint32_t attended = attended_columns(p);
    multiply_one_row(ds, dout_smem(), loop.of_warp(loop.tile_smem(stage, 1)));
    const ScoreGradient<true, 1, kN, Tf32x3> gradient(params, batch, head, 0, col0);
    gradient.probabilities(p[0], row.lse[0], 1.0f, 0, 0, kN);
    const float correction = in_natural_units(params) ? 1.0f : row.correction;
#pragma unroll
    for (int i = 0; i < 2 * kN; ++i) {
      float& value = p[0][i / 2][i % 2];
      value = attended >> i & 1 ? value * correction : 0.0f;
    }
    gradient.finish(p, ds, row.lse, row.delta);
    return attended;
  }
  // Computes tiles [tile, end). The first has been loaded.
  template <int kOutN>
  __device__ __forceinline__ void run(int32_t tile, int32_t end, float (&dquery)[1][kOutN][4],
                                      float* dkey, float* dvalue) const {
    const Shape& shape = params.shape;
#pragma unroll 1
    for (int stage = 0; tile < end; ++tile, stage ^= Config::kStages - 1) {
      const int32_t col0 =
          tile * Config::kBlockKv + static_cast<int>(threadIdx.x) / 32 * Config::kWarpKeys;
      RowElements<kN> elements;
      if (loop.call.loads) modifiers.load_row(elements, 0, col0);  // while copies are in flight
      wait_for_copies();
      if (Config::kStages == 2 && tile + 1 < end) loop.load(tile + 1, stage ^ 1);
      ptx::cp_async_commit_group();
      Factors p, ds;
      const uint32_t attended = differentiate(p, ds, col0, stage, elements);
      store_multiples(params.dvalue, dvalue, shape.value_dim, col0, shape.kv_len, p, dout_smem());
#pragma unroll
      for (int i = 0; i < 2 * kN; ++i) ds[0][i / 2][i % 2] *= params.options.scale;
      store_multiples(params.dkey, dkey, shape.head_dim, col0, shape.kv_len, ds, loop.query_smem);
      add_one_row(dquery, ds, loop.of_warp(loop.tile_smem(stage, 0)), attended);
      if (Config::kStages == 1) {
        __syncthreads();
        if (tile + 1 < end) loop.load(tile + 1, 0);
        ptx::cp_async_commit_group();
      }
    }
    wait_for_copies();
  }
};

// The grid is [parts, units].
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    decode_gradient_kernel(const __grid_constant__ DecodeCall call,
                           const __grid_constant__ Backward params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  const DecodeParts& parts = call.parts;
  const auto part = parts.units.quotient(static_cast<int32_t>(blockIdx.x));
  const auto unit_index = static_cast<int32_t>(blockIdx.x) - part * parts.units.divisor;
  const DecodeUnit unit(params.shape, parts, unit_index);
  const BatchIndex batch(call.batch_axes, unit.batch);
  const Band band = call.band_of(params, unit.batch, batch);
  const int32_t head = unit.kv_head;
  const int32_t tiles = (params.shape.kv_len + Config::kBlockKv - 1) / Config::kBlockKv;
  const int32_t share = parts.parts.quotient(tiles + parts.parts.divisor - 1);
  const int32_t first = part * share, end = min(first + share, tiles);
  using Gradient = OneRowGradient<Config>;
  const typename Gradient::Loop loop{call,
                                     params,
                                     band,
                                     {ptx::shared_address(smem), 0},
                                     batch.pointer<const Float32>(params.key, head),
                                     batch.pointer<const Float32>(params.value, head),
                                     band.first_col(0),
                                     band.end_col(0),
                                     1};
  const LogitModifiers modifiers(params, batch, head, call.modified);
  if (first < end) loop.load(first, 0);
  load_query_rows<Config, Float32>(loop.query_smem, params.query, params.shape.head_dim, batch,
                                   unit);
  load_query_rows<Config, Float32>({loop.query_smem.root, 128}, params.dout, params.shape.value_dim,
                                   batch, unit);
  ptx::cp_async_commit_group();
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
#endif
  const RowStatistics row(params, batch, head);
  float dquery[1][Config::kOutN][4];
  set_zero(dquery);
  const Gradient gradient{loop, params, batch, modifiers, row, head};
  gradient.run(first, end, dquery, batch.pointer<float>(params.dkey, head),
               batch.pointer<float>(params.dvalue, head));

  auto* sums = reinterpret_cast<float*>(smem);
  put_columns(sums + threadIdx.x / 32 * Config::kHeadDim, dquery);
  __syncthreads();
  const bool whole = parts.parts.divisor == 1;
  float* to = whole
                  ? batch.pointer<float>(params.dquery, head)
                  : parts.values + (int64_t{unit_index} * parts.parts.divisor + part) * parts.pitch;
  const int32_t cols = whole ? params.shape.head_dim : parts.pitch;  // four are read at a time
  for (int32_t col = threadIdx.x; col < cols; col += Config::kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < Config::kWarps; ++warp) sum += sums[warp * Config::kHeadDim + col];
    to[col] = sum;
  }
}

// Launches the backward pass of one row. kHeadDim bounds head_dim and value_dim.
template <int kHeadDim>
Status launch_decode_gradient(const Backward& params, cudaStream_t stream) {
  using Config = DecodeConfig<Float32, kHeadDim>;
  int sms = 0;
  if (const Status status = multiprocessors(sms); !status.ok()) return status;
  const DecodeParts parts =
      DecodeParts::of_gradient(params.shape, int64_t{sms} * Config::kBlocks, params.workspace);
  const DecodeCall call(params, parts);
  const Status status =
      launch_kernel("sm80::decode_gradient_kernel", params.shape, decode_gradient_kernel<Config>,
                    parts.blocks(), Config::kThreads, Config::kSmemBytes, stream, call, params);
  if (!status.ok() || parts.parts.divisor == 1) return status;
  return launch_decode_dquery(call, params, stream);
}

}  // namespace jax_flash::sm80
