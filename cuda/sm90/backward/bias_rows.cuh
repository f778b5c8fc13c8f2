// Holds a tile of a bias in shared memory for the kernel of its gradient (bias_gradient.cuh). Each
// consumer warp loads its 16 rows of the bias and adds them to the logits of each step. At the end,
// it puts dbias in their place and writes it to device memory row by row.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "modifiers/bias.cuh"
#include "modifiers/bias_gradient.cuh"
#include "modifiers/pairs.cuh"
#include "params.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace jax_flash::sm90 {

// Holds a warp's 16 rows of the tile. kRounded: elements have the operands' type; otherwise they
// are float32. The 16-byte chunks of a row are swizzled, so that accesses neither by rows nor by
// fragments have bank conflicts.
template <typename Config, typename Element, bool kRounded>
struct BiasRows {
  static constexpr int kRows = 16, kCols = Config::kBlock, kN = kCols / 8;
  static constexpr int kElementBytes = kRounded ? 2 : 4, kChunkElements = 16 / kElementBytes;
  static constexpr int kRowChunks = kCols / kChunkElements, kChunks = kRows * kRowChunks;
  static constexpr DType kDType = !kRounded                                ? DType::kFloat32
                                  : std::is_same_v<Element, __nv_bfloat16> ? DType::kBFloat16
                                                                           : DType::kFloat16;

  uint32_t address;

  // `root`: address of the rows of all warps. Called by the consumers' threads.
  explicit __device__ __forceinline__ BiasRows(uint32_t root)
      : address(root + (threadIdx.x / 32 - 4) * kChunks * 16) {}

  // Reads the bias of rows row0... and columns col0..., of one batch and head.
  __device__ __forceinline__ void load(const Operand& bias, int64_t offset, int32_t row0,
                                       int32_t col0, const Extent& extent) const {
    __syncwarp();
    const int64_t first = offset + row0 * bias.row + col0 * bias.col;
    if (__all_sync(0xffffffff,
                   has_chunks(bias, first) && extent.contains(row0 + kRows, col0 + kCols))) {
      constexpr int kTogether = 8;
#pragma unroll 1
      for (int i = 0; i < kPerLane; i += kTogether) {
        uint4 values[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) values[j] = __ldg(chunk_of(bias, first, i + j));
#pragma unroll
        for (int j = 0; j < kTogether; ++j) ptx::st_shared_v4(own_address(i + j), values[j]);
      }
    } else {
      for_elements([&](int r, int c, uint32_t at) {
        const int64_t from = min(row0 + r, extent.rows - 1) * bias.row;
        set(at, load_float(bias, offset + from + min(col0 + c, extent.cols - 1) * bias.col));
      });
    }
    __syncwarp();
  }
  // Multiplies products by `scale` and adds the bias.
  __device__ __forceinline__ void add_to(float (&scores)[kN][4], float scale) const {
    if constexpr (kRounded) {
      const int lane = threadIdx.x % 32;
      const uint32_t base = chunk_address(lane % 16, lane / 16);
      constexpr int kTogether = 4;
#pragma unroll
      for (int n = 0; n < kN; n += 2 * kTogether) {
        uint32_t pairs[kTogether][4];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) ptx::ldmatrix_x4(pairs[j], base ^ ((n + 2 * j) * 16));
#pragma unroll
        for (int i = 0; i < 4 * kTogether; ++i) {
          Element pair[2];
          memcpy(pair, &pairs[i / 4][i % 4], 4);
          float* const both = &scores[n + i / 2][i % 2 * 2];
          both[0] = fmaf(both[0], scale, to_float(pair[0]));
          both[1] = fmaf(both[1], scale, to_float(pair[1]));
        }
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t base = fragment_address(half);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const float2 pair = ptx::ld_shared_v2_f32(base ^ (n * 32));
          scores[n][2 * half] = fmaf(scores[n][2 * half], scale, pair.x);
          scores[n][2 * half + 1] = fmaf(scores[n][2 * half + 1], scale, pair.y);
        }
      }
    }
  }
  // Overwrites the bias with dbias.
  __device__ __forceinline__ void put(const float (&sums)[kN][4]) const {
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t base = fragment_address(half);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const float x = sums[n][2 * half], y = sums[n][2 * half + 1];
        if constexpr (kRounded) {
          ptx::st_shared_b32(base ^ (n * 16), ptx::cvt_rn_x2<Element>(x, y));
        } else {
          ptx::st_shared_v2(base ^ (n * 32), make_uint2(__float_as_uint(x), __float_as_uint(y)));
        }
      }
    }
    __syncwarp();
  }
  // Writes dbias to rows row0... and columns col0... that exist, of one batch and head.
  __device__ __forceinline__ void store(const Operand& dbias, int64_t offset, int32_t row0,
                                        int32_t col0, const Extent& extent) const {
    const int64_t first = offset + row0 * dbias.row + col0 * dbias.col;
    // A last chunk may reach into the padding between rows.
    const bool whole = dbias.row != 0 || extent.cols % kChunkElements == 0;
    if (__all_sync(0xffffffff, has_chunks(dbias, first) && whole)) {
      const bool valid = col0 + own_chunk() * kChunkElements < extent.cols;
      const int32_t rows = extent.rows - row0 - own_row(0);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (!valid || i * kRowStep >= rows) continue;
        *chunk_of(dbias, first, i) = ptx::ld_shared_v4(own_address(i));
      }
    } else {
      for_elements([&](int r, int c, uint32_t at) {
        if (row0 + r >= extent.rows || col0 + c >= extent.cols) return;
        store_float(dbias, first + r * dbias.row + c * dbias.col, get(at));
      });
    }
  }

 private:
  // Lanes read and write whole rows. A lane has kPerLane chunks, at one place in every kRowStep-th
  // row.
  static constexpr int kPerLane = kChunks / 32, kRowStep = 32 / kRowChunks;
  static_assert(32 % kRowChunks == 0 && kPerLane % 8 == 0);
  static __device__ __forceinline__ int own_row(int i) {
    return threadIdx.x % 32 / kRowChunks + i * kRowStep;
  }
  static __device__ __forceinline__ int own_chunk() { return threadIdx.x % kRowChunks; }
  __device__ __forceinline__ uint32_t own_address(int i) const {
    return chunk_address(own_row(i), own_chunk());
  }

  // Swizzles chunks: XORs a chunk's index with a number that depends on the row. For float32, this
  // number is even, which keeps pairs of chunks contiguous.
  __device__ __forceinline__ uint32_t chunk_address(int r, int index) const {
    return address + (r * kRowChunks + (index ^ (r % 8 << !kRounded))) * 16;
  }
  // Returns the address of this thread's first pair of elements in the upper or lower 8 rows.
  __device__ __forceinline__ uint32_t fragment_address(int half) const {
    const int lane = threadIdx.x % 32, byte = lane % 4 * 2 * kElementBytes;
    return chunk_address(lane / 4 + 8 * half, byte / 16) + byte % 16;
  }
  // Returns true if rows are whole, aligned chunks in device memory. `first`: the index of some
  // chunk.
  static __device__ __forceinline__ bool has_chunks(const Operand& operand, int64_t first) {
    return operand.dtype == kDType && operand.col == 1 && operand.row % kChunkElements == 0 &&
           reinterpret_cast<uintptr_t>(element(operand, first)) % 16 == 0;
  }
  static __device__ __forceinline__ char* element(const Operand& operand, int64_t index) {
    return static_cast<char*>(operand.data) + index * kElementBytes;
  }
  // Returns the address of this lane's i-th chunk.
  static __device__ __forceinline__ uint4* chunk_of(const Operand& operand, int64_t first, int i) {
    const int64_t index = first + own_row(0) * operand.row + own_chunk() * kChunkElements;
    return reinterpret_cast<uint4*>(element(operand, index + i * (kRowStep * operand.row)));
  }
  // Calls body(row, column, address) for this lane's share of the elements.
  template <typename Body>
  __device__ __forceinline__ void for_elements(const Body& body) const {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kRows * kCols; i += 32) {
      const int r = i / kCols, c = i % kCols, byte = c * kElementBytes;
      body(r, c, chunk_address(r, byte / 16) + byte % 16);
    }
  }
  static __device__ __forceinline__ void set(uint32_t at, float value) {
    if constexpr (kRounded) {
      const uint32_t pair = ptx::cvt_rn_x2<Element>(value, value);
      memcpy(&in_shared<Element>(at), &pair, 2);
    } else {
      in_shared<float>(at) = value;
    }
  }
  static __device__ __forceinline__ float get(uint32_t at) {
    if constexpr (kRounded) return to_float(in_shared<Element>(at));
    return in_shared<float>(at);
  }
  template <typename Value>
  static __device__ __forceinline__ Value& in_shared(uint32_t at) {
    return *static_cast<Value*>(__cvta_shared_to_generic(at));
  }
};

}  // namespace jax_flash::sm90
