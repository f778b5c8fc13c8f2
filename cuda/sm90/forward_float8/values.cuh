// Transposes V for the FP8 forward kernel, since an FP8 product takes V with contiguous keys:
//
//   values[batch, kv head, tile][column][place of a key]   e4m3
//   factors[batch, kv head, tile]                          KeyFactors
//
// The values of keys that no query may attend to are replaced by zeros, since a product of NaN with
// a P of 0 is NaN: always, if the keys' positions forbid them; if their segments do, only for
// values with NaN.
//
// A tile has SmemTile's layout, so that one plain copy brings it to shared memory. Among every 16
// keys, place 4 t + r holds key 8 (r / 2) + 2 t + r % 2: a thread's accumulators of S then have the
// order of its fragment of P (wgmma.h).
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/float8.h"
#include "plan/segment_spans.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"

namespace jax_flash::sm90 {

inline constexpr int kValuesThreads = 256;

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

// Finds the factors of a key tile. Called by one warp.
struct KeyFactorsFinder {
  float greatest = 0.0f, key = 0.0f,
        value = 0.0f;  // scales; the greatest of those that a lane read

  // Reads scales. This precedes the loads of values, for which all warps wait. Those of tiles
  // beyond the kv_len keys must not be the greatest.
  __device__ __forceinline__ void read(const Scales& scales, const BatchIndex& batch, int32_t head,
                                       int32_t tile, int32_t kv_len) {
    const float* of_values = batch.pointer<const float>(scales.value, head);
    key = batch.pointer<const float>(scales.key, head)[tile * scales.key.row];
    value = of_values[tile * scales.value.row];
    const int32_t count = scales.value.row == 0 ? 1 : (kv_len + kScaleBlock - 1) / kScaleBlock;
    for (int32_t i = threadIdx.x % 32; i < count; i += 32) {
      greatest = fmaxf(greatest, of_values[i * scales.value.row]);
    }
  }

  __device__ __forceinline__ KeyFactors result() const {
    float most = greatest;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, distance));
    }
    // The share is bounded, so that its reciprocal is finite.
    float share = value / most;
    share = share == share && most > 0.0f ? fmaxf(share, 0x1p-100f) : share;
    if (most == 0.0f) share = 1.0f;
    return {key, log2f(share), 1.0f / share, most};
  }
};

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

// Returns true if some of four numbers of e4m3 is NaN.
__device__ __forceinline__ bool has_nan(uint32_t bytes) {
  return (((bytes & 0x7f7f7f7f) + 0x01010101) & 0x80808080) != 0;
}

// Decides which keys of a batch some query may attend to, by position and by segments, if the call
// has any.
struct AttendedKeys {
  Band band;
  const int32_t *query_ids = nullptr, *key_ids = nullptr;

  __device__ __forceinline__ AttendedKeys(const Forward& params, const BatchIndex& batch,
                                          const SegmentSpans& spans, int64_t index)
      : band(params, batch) {
    if (spans.query == nullptr) return;
    query_ids = spans.query_ids + index * spans.query_blocks * kSegmentBlock;
    key_ids = spans.key_ids + index * spans.key_blocks * kSegmentBlock;
  }
  __device__ __forceinline__ bool by_position(int32_t key) const {
    return key < band.kv_len && band.first_row(key) < band.end_row(key + 1);
  }
  // Returns whether a query has the key's segment. Called by whole warps.
  __device__ __forceinline__ bool by_segment(int32_t key) const {
    const int32_t id = key_ids[key], end = band.end_row(key + 1);
    bool found = false;
    for (int32_t row = band.first_row(key) + static_cast<int32_t>(threadIdx.x % 32); row < end;
         row += 32) {
      found = found || query_ids[row] == id;
    }
    return __any_sync(0xffffffff, found);
  }
};

// Zeroes the values of keys whose bits of `nan` are set and whose segment no query has. `key0`: the
// tile's first key.
template <int kValueDim, int kPitch>
__device__ __forceinline__ void clear_other_segments(const AttendedKeys& attended, int32_t key0,
                                                     const uint32_t (&nan)[kScaleBlock / 32],
                                                     uint8_t (&stored)[kScaleBlock][kPitch]) {
  for (int key = threadIdx.x / 32; key < kScaleBlock; key += kValuesThreads / 32) {
    if (!(nan[key / 32] >> key % 32 & 1) || attended.by_segment(key0 + key)) continue;
    for (int chunk = threadIdx.x % 32; chunk < kValueDim / 16; chunk += 32) {
      *reinterpret_cast<uint4*>(&stored[key][chunk * 16]) = uint4{};
    }
  }
  __syncthreads();
}

// Copies a tile to shared memory. `key0`: its first key. Sets bits of `nan` for keys whose values
// have NaN.
template <int kValueDim, int kPitch>
__device__ __forceinline__ void load_tile(const Operand& value, const uint8_t* from,
                                          const AttendedKeys& attended, int32_t key0,
                                          uint8_t (&stored)[kScaleBlock][kPitch],
                                          uint32_t (&nan)[kScaleBlock / 32]) {
  constexpr int kChunks = kValueDim / 16, kLoads = kScaleBlock * kChunks / kValuesThreads;
  static_assert(kLoads * kValuesThreads == kScaleBlock * kChunks);
  constexpr int kAtOnce = kLoads > 4 ? kLoads / 2 : kLoads;
#pragma unroll
  for (int start = 0; start < kLoads; start += kAtOnce) {
    uint4 bytes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = threadIdx.x + (start + i) * kValuesThreads;
      const int32_t key = key0 + place / kChunks;
      bytes[i] = uint4{};
      if (attended.by_position(key)) {
        bytes[i] = __ldg(reinterpret_cast<const uint4*>(from + key * value.row) + place % kChunks);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = threadIdx.x + (start + i) * kValuesThreads, key = place / kChunks;
      const uint4& own = bytes[i];
      if (has_nan(own.x) || has_nan(own.y) || has_nan(own.z) || has_nan(own.w)) {
        atomicOr(&nan[key / 32], 1u << key % 32);
      }
      *reinterpret_cast<uint4*>(&stored[key][place % kChunks * 16]) = own;
    }
  }
}

// Transposes a tile in place. The result has rows of kScaleBlock bytes.
template <int kValueDim, int kPitch>
__device__ __forceinline__ void transpose_tile(uint8_t (&stored)[kScaleBlock][kPitch]) {
  constexpr int kKeys = kScaleBlock;
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
}

// Transposes V and computes the factors of its tiles. Grid: a block for each tile of each batch and
// head. Heads vary fastest, so that neighbours in memory are read at the same time.
template <int kValueDim>
__global__ void __launch_bounds__(kValuesThreads)
    float8_values_kernel(const __grid_constant__ Forward params,
                         const __grid_constant__ Scales scales, Float8Workspace workspace,
                         SegmentSpans spans) {
  ptx::griddepcontrol_launch_dependents();
  constexpr int kKeys = kScaleBlock, kPitch = kValueDim + 16;
  __shared__ alignas(128) uint8_t stored[kKeys][kPitch];  // then the result
  __shared__ uint32_t nan[kKeys / 32];                    // a bit for each key
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.counter = 0;
  const Shape& shape = params.shape;
  const int32_t turn = static_cast<int32_t>(blockIdx.x) / shape.kv_heads;
  const int32_t head = static_cast<int32_t>(blockIdx.x) - turn * shape.kv_heads;
  const int32_t batch_index = turn / workspace.tiles;
  const int32_t tile = turn - batch_index * workspace.tiles;
  const int64_t index = (int64_t{batch_index} * shape.kv_heads + head) * workspace.tiles + tile;
  const BatchIndex batch(shape, batch_index);
  KeyFactorsFinder finder;
  const AttendedKeys attended(params, batch, spans, batch_index);
  const bool finds = threadIdx.x >= kValuesThreads - 32;
  if (finds) finder.read(scales, batch, head, tile, attended.band.kv_len);
  if (threadIdx.x < kKeys / 32) nan[threadIdx.x] = 0;
  __syncthreads();
  load_tile<kValueDim>(params.value, batch.pointer<const uint8_t>(params.value, head), attended,
                       tile * kKeys, stored, nan);
  __syncthreads();
  if (attended.query_ids != nullptr) {
    clear_other_segments<kValueDim>(attended, tile * kKeys, nan, stored);
  }
  transpose_tile<kValueDim>(stored);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::cp_async_bulk_store(workspace.values + index * (kValueDim * kKeys),
                             ptx::shared_address(&stored[0][0]), kValueDim * kKeys);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group<0>();
  }
  if (finds) {
    const KeyFactors factors = finder.result();
    if (threadIdx.x % 32 == 0) workspace.factors[index] = factors;
  }
}

template <int kValueDim>
Status launch_float8_values(const Forward& params, const Scales& scales,
                            const Float8Workspace& workspace, const SegmentSpans& spans,
                            cudaStream_t stream) {
  const Shape& shape = params.shape;
  return launch_kernel("sm90::float8_values_kernel", shape, float8_values_kernel<kValueDim>,
                       shape.batch * shape.kv_heads * workspace.tiles, kValuesThreads, 0, stream,
                       params, scales, workspace, spans);
}

}  // namespace jax_flash::sm90
