// Prepares values for the FP8 forward kernel: an FP8 product takes the keys of V contiguous.
//
//   values[batch, kv head, tile][column][place of a key]   e4m3, zeros from kv_len on
//   factors[batch, kv head, tile]                          KeyFactors
//
// A tile is as SmemTile has it in shared memory, so that one plain copy fetches it. In every 16
// keys, that of place 4 t + r is 8 (r / 2) + 2 t + r % 2: a thread's accumulators of S are then its
// fragment of P (wgmma.h).
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/float8.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

inline constexpr int kValuesThreads = 256;

// Returns the greatest number among those of a block's threads.
__device__ __forceinline__ float block_maximum(float x) {
  __shared__ float of_warps[kValuesThreads / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
#pragma unroll
  for (float other : of_warps) x = fmaxf(x, other);
  return x;
}

// Transposes 4x4 bytes: byte j of word i goes to byte i of word j.
__device__ __forceinline__ void transpose_bytes(uint32_t (&word)[4]) {
  const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140);
  const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140);
  const uint32_t high01 = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t high23 = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(low01, low23, 0x5410);
  word[1] = __byte_perm(low01, low23, 0x7632);
  word[2] = __byte_perm(high01, high23, 0x5410);
  word[3] = __byte_perm(high01, high23, 0x7632);
}

// Computes what the keys of a tile have in common.
__device__ __forceinline__ void find_key_factors(const Shape& shape, const Scales& scales,
                                                 const Float8Workspace& workspace,
                                                 const BatchIndex& batch, int32_t head,
                                                 int32_t tile, int64_t index) {
  const float* of_values = batch.pointer<const float>(scales.value, head);
  const int32_t count = scales.value.row == 0 ? 1 : workspace.tiles;
  float greatest = 0.0f;
  for (int32_t i = threadIdx.x; i < count; i += kValuesThreads) {
    greatest = fmaxf(greatest, of_values[i * scales.value.row]);
  }
  greatest = block_maximum(greatest);
  if (threadIdx.x != 0) return;
  // Bounded, so that its reciprocal is finite.
  float share = of_values[tile * scales.value.row] / greatest;
  share = share == share && greatest > 0.0f ? fmaxf(share, 0x1p-100f) : share;
  if (greatest == 0.0f) share = 1.0f;
  workspace.factors[index] = {batch.pointer<const float>(scales.key, head)[tile * scales.key.row],
                              log2f(share), 1.0f / share, greatest};
}

// Loads four columns of 16 keys of a tile, and transposes them: 16 bytes for each column.
template <int kPitch>
__device__ __forceinline__ void load_transposed(const uint8_t (&stored)[kScaleBlock][kPitch],
                                                int column, int key, uint32_t (&words)[4][4]) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    uint32_t of_keys[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = key + 8 * (r / 2) + 2 * t + r % 2;
      of_keys[r] = *reinterpret_cast<const uint32_t*>(&stored[row][column]);
    }
    transpose_bytes(of_keys);
#pragma unroll
    for (int c = 0; c < 4; ++c) words[c][t] = of_keys[c];
  }
}

// Grid: a block for each tile of each batch and head, tiles fastest.
template <int kValueDim>
__global__ void __launch_bounds__(kValuesThreads)
    float8_values_kernel(const __grid_constant__ Forward params,
                         const __grid_constant__ Scales scales, Float8Workspace workspace) {
  ptx::griddepcontrol_launch_dependents();
  constexpr int kKeys = kScaleBlock, kPitch = kValueDim + 16;
  __shared__ alignas(128) uint8_t stored[kKeys][kPitch];  // then the result
  const Shape& shape = params.shape;
  const int64_t index = blockIdx.x;
  const int32_t tile = static_cast<int32_t>(index % workspace.tiles);
  const int32_t head = static_cast<int32_t>(index / workspace.tiles % shape.kv_heads);
  const BatchIndex batch(shape, index / workspace.tiles / shape.kv_heads);
  const int32_t kv_len = Band(params, batch).kv_len;
  const uint8_t* from = batch.pointer<const uint8_t>(params.value, head);
  constexpr int kChunks = kValueDim / 16;
#pragma unroll
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kValuesThreads) {
    const int key = i / kChunks, chunk = i % kChunks;
    const int64_t row = int64_t{tile} * kKeys + key;
    uint4 bytes = {};
    if (row < kv_len) {
      bytes = *reinterpret_cast<const uint4*>(from + row * params.value.row + chunk * 16);
    }
    *reinterpret_cast<uint4*>(&stored[key][chunk * 16]) = bytes;
  }
  find_key_factors(shape, scales, workspace, batch, head, tile, index);
  __syncthreads();
  // Each part is four columns of 16 keys. Neighbouring threads have neighbouring columns, which are
  // in different banks.
  constexpr int kFours = kValueDim / 4, kParts = kFours * (kKeys / 16);
  constexpr int kOwnParts = (kParts + kValuesThreads - 1) / kValuesThreads;
  uint32_t words[kOwnParts][4][4];
#pragma unroll
  for (int own = 0; own < kOwnParts; ++own) {
    const int part = threadIdx.x + own * kValuesThreads;
    if (part < kParts) load_transposed(stored, part % kFours * 4, part / kFours * 16, words[own]);
  }
  __syncthreads();
  uint8_t* result = &stored[0][0];
#pragma unroll
  for (int own = 0; own < kOwnParts; ++own) {
    const int part = threadIdx.x + own * kValuesThreads;
    if (part >= kParts) continue;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int column = part % kFours * 4 + c, chunk = part / kFours ^ column % 8;
      const auto& of_column = words[own][c];
      *reinterpret_cast<uint4*>(result + column * kKeys + chunk * 16) =
          make_uint4(of_column[0], of_column[1], of_column[2], of_column[3]);
    }
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_store(workspace.values + index * (kValueDim * kKeys),
                             ptx::shared_address(result), kValueDim * kKeys);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<0>();
  }
}

template <int kValueDim>
Status launch_float8_values(const Forward& params, const Scales& scales,
                            const Float8Workspace& workspace, cudaStream_t stream) {
  const Shape& shape = params.shape;
  return launch_kernel("sm90::float8_values_kernel", shape, float8_values_kernel<kValueDim>,
                       shape.batch * shape.kv_heads * workspace.tiles, kValuesThreads, 0, stream,
                       params, scales, workspace);
}

}  // namespace jax_flash::sm90
