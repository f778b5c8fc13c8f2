// Prepares masks for the sm_90 backward kernels up to head dim 128. Kernels that run before them
// compute the mask's bits, in the order in which consumers read them, and the query tiles that a
// key tile can skip, once for all batches and heads that share the mask.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/mask_matrices.h"
#include "ptx/global.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"

namespace jax_flash::sm90 {

// Points to the mask's bits: one word for each lane of a warp, for each 16 keys and 64 rows of each
// [batch, heads] that the mask has. TransposedMask defines the order of the bits.
struct TransposedMaskWords : MaskMatrices {
  const uint32_t* words = nullptr;
  int32_t row_groups = 1, key_groups = 1;
  int64_t batch_strides[2] = {}, head_stride = 0;

  TransposedMaskWords() = default;
  TransposedMaskWords(const Shape& shape, const Operand& mask, const uint32_t* made)
      : MaskMatrices(shape, mask),
        words(made),
        row_groups(static_cast<int32_t>(BackwardWorkspace::mask_row_groups(rows))),
        key_groups(static_cast<int32_t>(BackwardWorkspace::mask_key_groups(shape))) {
    const int64_t matrix = int64_t{row_groups} * key_groups * 32;
    if (heads > 1) head_stride = matrix;
    if (batch[1] > 1) batch_strides[1] = matrix * heads;
    if (batch[0] > 1) batch_strides[0] = matrix * heads * batch[1];
  }
  // Returns the lane's word for 16 keys from `key` on, which exist, and 64 rows from `row` on.
  // Beyond the last rows, the word is that of the last.
  __device__ __forceinline__ uint32_t load(const BatchIndex& index, int32_t head, int32_t row,
                                           int32_t key) const {
    const int64_t matrix = index.coordinate[0] * batch_strides[0] +
                           index.coordinate[1] * batch_strides[1] + head * head_stride;
    const int32_t row_group = min(row / 64, row_groups - 1);
    return __ldg(words + matrix + (int64_t{row_group} * key_groups + key / 16) * 32 +
                 threadIdx.x % 32);
  }
};

// Holds a range of rows for each tile of kKeys keys, of each [batch, heads] that the mask has: from
// the first row that the mask lets attend to the tile to just past the last.
struct MaskRows : MaskMatrices {
  static constexpr int kKeys = 128;

  const int2* ranges = nullptr;  // null: not computed
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

  // Narrows a range of tiles of kBlockQ rows to those that any of a batch's `group` heads from
  // first_head on needs.
  template <int kBlockQ>
  __device__ __forceinline__ Range narrow(const Range& range, const int32_t (&batch_axes)[2],
                                          int32_t first_head, int32_t group,
                                          int32_t kv_tile) const {
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
    return first < end ? Range{first, end} : Range{0, 0};
  }
};

// Loads the mask of 16 keys and 64 query rows, by a warp, and turns it into bits in the order of
// fragments whose columns are queries: element [n][2 half + e] is bit 8 (half + n / 4 * 2) + n % 4
// * 2 + e. Loaded by elements, this would take 32 loads of one byte. Instead, a lane loads two
// rows, and the lanes exchange bits. Bytes are 0 or 1.
struct TransposedMask {
  uint4 bytes[2] = {};

  // `mask` points to row 0 and the first key. Rows beyond the last repeat the last.
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
  // Finds the bits element by element. Keys beyond the last are not allowed.
  static __device__ __forceinline__ uint32_t bits_of(const uint8_t* mask, const Operand& operand,
                                                     int32_t row0, int32_t rows, int32_t keys) {
    const int lane = threadIdx.x % 32;
    uint32_t found = 0;
    for (int i = 0; i < 32; ++i) {
      const int half = i / 8 % 2, n = i / 16 * 4 + i % 8 / 2;
      const int32_t key = lane / 4 + 8 * half;
      const int32_t row = min(row0 + n * 8 + lane % 4 * 2 + i % 2, rows - 1);
      const bool allowed = key < keys && mask[row * operand.row + key * operand.col] != 0;
      found |= (allowed ? 1u : 0u) << i;
    }
    return found;
  }
};

// Computes the words of TransposedMaskWords. A warp computes those of 16 keys and 64 rows.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    transposed_mask_words_kernel(const __grid_constant__ Operand mask,
                                 const __grid_constant__ TransposedMaskWords made, int32_t kv_len,
                                 bool vectors, int64_t blocks, uint32_t* words) {
  const int64_t block = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int64_t rows_of_matrices = block / made.key_groups;
  if (block >= blocks) return;
  const auto key0 = static_cast<int32_t>(block - rows_of_matrices * made.key_groups) * 16;
  const int64_t matrix = rows_of_matrices / made.row_groups;
  const auto row0 = static_cast<int32_t>(rows_of_matrices - matrix * made.row_groups) * 64;
  const int64_t batch = matrix / made.heads, head = matrix - batch * made.heads;
  const uint8_t* data = static_cast<const uint8_t*>(mask.data) + head * mask.head +
                        batch % made.batch[1] * mask.batch[1] +
                        batch / made.batch[1] * mask.batch[0] + key0 * mask.col;
  uint32_t bits;
  if (vectors) {
    TransposedMask bytes;
    bytes.load(data, mask.row, row0, made.rows);
    bits = bytes.bits();
  } else {
    bits = TransposedMask::bits_of(data, mask, row0, made.rows, kv_len - key0);
  }
  words[block * 32 + threadIdx.x % 32] = bits;
}

// Prefetches the bias of 16 keys from `key` on and 64 query rows from row0 on to L2. Each lane
// prefetches two rows.
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

// Computes the ranges of MaskRows. The grid has a block for each key tile of each [batch, heads] of
// the mask.
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

}  // namespace jax_flash::sm90
