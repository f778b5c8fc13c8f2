// Finds the query tiles that a mask lets a key tile skip, for the sm_90 backward kernels up to head
// dim 128. A kernel before them does so once for all batches and heads that share the mask.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/mask_matrices.h"
#include "ptx/global.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

// Holds a range of rows for each tile of kKeys keys, of each [batch, heads] that the mask has: from
// the first row that may attend to the tile, by the mask, to just past the last.
struct MaskRows : MaskMatrices {
  static constexpr int kKeys = 128;

  const int2* ranges = nullptr;  // null: nothing is known
  int32_t tiles = 0;
  int32_t batch_strides[2] = {}, head_stride = 0;

  MaskRows() = default;
  MaskRows(const Shape& shape, const Operand& mask)
      : MaskMatrices(shape, mask), tiles(shape.kv_len / kKeys + (shape.kv_len % kKeys != 0)) {
    if (heads > 1) head_stride = tiles;
    if (batch[1] > 1) batch_strides[1] = tiles * heads;
    if (batch[0] > 1) batch_strides[0] = tiles * heads * batch[1];
  }
  int64_t bytes() const { return matrices() * tiles * 8; }

  // Narrows a range of tiles of kBlockQ rows to those that any of `group` heads of a batch, from
  // first_head on, needs.
  template <int kBlockQ>
  __device__ __forceinline__ TileRange narrow(const TileRange& range,
                                              const int32_t (&batch_axes)[2], int32_t first_head,
                                              int32_t group, int32_t kv_tile) const {
    const int2* at = ranges + batch_axes[0] * batch_strides[0] + batch_axes[1] * batch_strides[1] +
                     first_head * head_stride + kv_tile;
    int2 left = {INT32_MAX, 0};
    for (int32_t head = 0; head < (head_stride == 0 ? 1 : group); ++head) {
      const int2 of_head = at[head * head_stride];
      left = {min(left.x, of_head.x), max(left.y, of_head.y)};
    }
    if (left.x >= left.y) return {0, 0};
    if (rows == 1) return range;
    const int32_t first = max(range.first, left.x / kBlockQ);
    const int32_t end = min(range.end, (left.y + kBlockQ - 1) / kBlockQ);
    return first < end ? TileRange{first, end} : TileRange{0, 0};
  }
};

// True if the mask of every 16 keys can be read as a vector, as TransposedMask requires.
inline bool mask_is_read_by_rows(const Forward& params) {
  return bool{params.mask} && mask_has_vectors(params, 16);
}

// Loads the mask of a warp's 16 keys and 64 query rows, and turns it into bits in the order of
// fragments whose columns are queries: element [n][2 half + e] is bit
// 8 (half + n / 4 * 2) + n % 4 * 2 + e. Element by element this would take 32 loads of one byte.
// Instead, a lane loads two rows, and the lanes exchange bits. Bytes are 0 or 1.
struct TransposedMask {
  uint4 bytes[2] = {};

  // `mask` points to row 0 and the warp's first key. Rows beyond the last repeat the last.
  __device__ __forceinline__ void load(const uint8_t* mask, int64_t stride, int32_t row0,
                                       int32_t count) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = min(row0 + static_cast<int32_t>(threadIdx.x) % 32 + 32 * i, count - 1);
      bytes[i] = *reinterpret_cast<const uint4*>(mask + row * stride);
    }
  }
  __device__ __forceinline__ uint32_t bits() const {
    constexpr uint32_t kGather = 1u << 28 | 1u << 21 | 1u << 14 | 1u << 7;  // into the top 4 bits
    uint32_t rows = 0;  // bits of 16 keys in row `lane`, and in row `lane + 32`
#pragma unroll
    for (int i = 1; i >= 0; --i) {
      const uint32_t words[4] = {bytes[i].w, bytes[i].z, bytes[i].y, bytes[i].x};
#pragma unroll
      for (const uint32_t word : words) rows = __funnelshift_l(word * kGather, rows, 4);
    }
    const int key = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t other = __shfl_sync(0xffffffff, rows, i / 2 * 8 + pair + i % 2);
      found |= (other >> key & 0x01010101) << i;
    }
    return found;
  }
};

// Prefetches the same elements of a bias to L2: each lane prefetches those of two rows.
__device__ __forceinline__ void prefetch_bias(const Forward& params, const BatchIndex& batch,
                                              int32_t head, int32_t row0, int32_t key) {
  const Operand& bias = params.bias;
  const int64_t first = batch.offset(bias) + head * bias.head + key * bias.col;
  const int bytes = bias.dtype == DType::kFloat32 ? 4 : 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t lane_row = row0 + static_cast<int32_t>(threadIdx.x) % 32 + 32 * i;
    const int32_t row = min(lane_row, params.shape.q_len - 1);
    ptx::prefetch_l2(static_cast<const uint8_t*>(bias.data) + (first + row * bias.row) * bytes);
  }
}

inline constexpr int kMaskRowsThreads = 1024;

// Computes `ranges`: from the first row that may attend to a key of the tile to just past the last.
// The grid has a block for each key tile of each [batch, heads] of the mask.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    mask_rows_kernel(const __grid_constant__ Operand mask, const __grid_constant__ MaskRows made,
                     int32_t kv_len, bool vectors, int2* ranges) {
  constexpr int kWarps = kThreads / 32, kInFlight = 16, kLaneKeys = MaskRows::kKeys / 32;
  static_assert(kLaneKeys == 4);
  const int32_t tile = blockIdx.x % made.tiles, matrix = blockIdx.x / made.tiles;
  const int32_t head = matrix % made.heads, batch = matrix / made.heads;
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t col = tile * MaskRows::kKeys + lane * kLaneKeys;
  const uint8_t* data = static_cast<const uint8_t*>(mask.data) + head * mask.head +
                        batch % made.batch[1] * mask.batch[1] +
                        batch / made.batch[1] * mask.batch[0] + col * mask.col;
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
  for (int32_t row0 = warp; row0 < made.rows; row0 += kWarps * kInFlight) {
    uint32_t words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t row = row0 + i * kWarps;
      words[i] = row < made.rows ? load(row) : 0;
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

// Launches the search if it pays. If few heads share a mask, reading it takes longer than the
// skipped tiles save, and in short calls the launch itself does. The ranges reuse the memory of the
// parts of key blocks, which calls with a mask do not have.
inline Status launch_mask_rows(const Backward& params, const BackwardWorkspace& workspace,
                               MaskRows& mask_rows, cudaStream_t stream) {
  constexpr int32_t kLeastRows = 1024;
  const Shape& shape = params.shape;
  if (!params.mask || shape.q_len < kLeastRows) return {};
  MaskRows made(shape, params.mask);
  if (!made.shared(shape) || made.bytes() > workspace.split_sums_bytes) return {};
  int2* const ranges = reinterpret_cast<int2*>(workspace.split_sums);
  made.ranges = ranges;
  mask_rows = made;
  return launch_kernel("sm90::mask_rows_kernel", shape, mask_rows_kernel<kMaskRowsThreads>,
                       made.matrices() * made.tiles, kMaskRowsThreads, 0, stream, params.mask, made,
                       shape.kv_len, mask_has_vectors(params, 4), ranges);
}

}  // namespace jax_flash::sm90
