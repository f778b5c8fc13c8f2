// Which query tiles a mask leaves to a tile of keys, for the sm_90 backward kernels up to head dim
// 128: found by a kernel before them, once for all batches and heads that share the mask.
#pragma once

#include <cstdint>

#include "params.h"
#include "sm80/workspace.h"
#include "sm90/backward_plan.cuh"
#include "sm90/forward_modified.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

inline constexpr int kMaskRowsThreads = 1024;

// Grid: for each of [batch, heads] of the mask a block for each tile of keys. `ranges`: from the
// first row that may attend to one of these to behind the last.
static __global__ void __launch_bounds__(kMaskRowsThreads)
    mask_rows_kernel(const __grid_constant__ Operand mask, const __grid_constant__ MaskRows strides,
                     int32_t rows, int32_t kv_len, bool vectors, int2* ranges) {
  constexpr int kWarps = kMaskRowsThreads / 32, kInFlight = 16, kLaneKeys = MaskRows::kKeys / 32;
  static_assert(kLaneKeys == 4);
  const int32_t tile = blockIdx.x % strides.tiles, matrix = blockIdx.x / strides.tiles;
  const int32_t head = matrix % strides.heads, batch = matrix / strides.heads;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t col = tile * MaskRows::kKeys + lane * kLaneKeys;
  const uint8_t* data = static_cast<const uint8_t*>(mask.data) + head * mask.head +
                        batch % strides.inner_batch * mask.batch[1] +
                        batch / strides.inner_batch * mask.batch[0] + col * mask.col;
  __shared__ int2 range;
  if (threadIdx.x == 0) range = {INT32_MAX, 0};
  __syncthreads();
  const auto load = [&](int32_t row) {
    const uint8_t* at = data + row * mask.row;
    if (vectors) return col < kv_len ? *reinterpret_cast<const uint32_t*>(at) : 0;
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kLaneKeys; ++i) {
      if (col + i < kv_len) any |= at[i * mask.col];
    }
    return any;
  };
  int2 found = {INT32_MAX, 0};
  for (int32_t row0 = warp; row0 < rows; row0 += kWarps * kInFlight) {
    uint32_t words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t row = row0 + i * kWarps;
      words[i] = row < rows ? load(row) : 0;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (words[i] != 0) {
        const int32_t row = row0 + i * kWarps;
        found = {min(found.x, row), row + 1};
      }
    }
  }
  found = {__reduce_min_sync(0xffffffff, found.x), __reduce_max_sync(0xffffffff, found.y)};
  if (lane == 0) {
    atomicMin(&range.x, found.x);
    atomicMax(&range.y, found.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) ranges[blockIdx.x] = range;
}

// Where few share a mask, reading it takes longer than what is skipped saves, and of short calls
// launching a kernel does. In the place of what calls with a mask do not have: parts of blocks of
// keys.
inline Status launch_mask_rows(const Backward& params, const BackwardWorkspace& workspace,
                               MaskRows& mask_rows, cudaStream_t stream) {
  constexpr int32_t kLeastRows = 1024;
  const Shape& shape = params.shape;
  if (!params.mask || shape.q_len < kLeastRows || shape.kv_len == 0) return {};
  MaskRows made(shape, params.mask);
  if (4 * made.matrices() > shape.batch * shape.heads ||
      made.bytes() > workspace.split_sums_bytes) {
    return {};
  }
  made.ranges = reinterpret_cast<int2*>(workspace.split_sums);
  mask_rows = made;
  const bool vectors = has_vectors(params.mask, 1, 4) && shape.kv_len % 4 == 0;
  const int32_t rows = params.mask.row == 0 ? 1 : shape.q_len;
  return launch_kernel("sm90::mask_rows_kernel", shape, mask_rows_kernel,
                       made.matrices() * made.tiles, kMaskRowsThreads, 0, stream, params.mask, made,
                       rows, shape.kv_len, vectors, reinterpret_cast<int2*>(workspace.split_sums));
}

}  // namespace jax_flash::sm90
