// Rotates rows if asked to, and rounds them to e4m3 with scales.
//
//   y = x S H / sqrt(m)       S: a diagonal of signs; H: blocks of Hadamard matrices of m rows
//   scale = max(|y|) / 448    over the finite y that share the scale, rounded up to a power of two
//   values = e4m3(y / scale)
//
// Without a rotation, y = x.
//
// A thread block takes a tile, which is up to kTileRows tokens of a head. It reads the tile once,
// and keeps it in registers. A thread holds up to kOwnChunks chunks, each of eight numbers of a
// row. All warps do the same work. If no other tile shares the scale, one launch computes scale and
// values. Otherwise one launch computes the scales by atomic maxima, and a second one reads x again
// and computes the values.
//
// The rotation is a butterfly. Its first three stages combine numbers within a chunk. The others
// exchange numbers between lanes, since neighbouring lanes hold neighbouring chunks of a row.
//
// Static shared memory holds the signs, those of a chunk in each byte, and the maxima of the warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "plan/divisor.h"
#include "quantize/quantize.h"
#include "tile/block_maximum.cuh"

namespace jax_flash {

inline constexpr int kTileRows = 128, kChunkCols = 8;
inline constexpr int kOwnChunks = 4;  // the most chunks of a thread
inline constexpr int kWidestRounded = 256;
inline constexpr int kMostQuantizeThreads = kTileRows * kWidestRounded / (kOwnChunks * kChunkCols);

// Says what a launch computes. kAll: scales and values.
enum class QuantizeStep { kAll, kScales, kValues };

// Holds an array and numbers that the host derives from its shape.
struct RoundingPlan : Rounding {
  PlainDivisor head_count, tiles_per_batch, tiles_per_block;
  int32_t block = 0, blocks = 0;  // tokens in a block that shares a scale, and number of blocks
  int32_t end = 0;                // the index past the array's last tile, in the grid
  int32_t batch_per_set = 0;      // 0: a set has many scales
  PlainDivisor chunks;            // the number of chunks of a row
  int32_t rows_at_once = 0;       // the number of rows for which a thread block has threads
  int32_t rotated = 0;            // the number of chunks of a row of a Hadamard matrix
  float factor = 0.0f;            // 1 / sqrt(m)
};

struct QuantizePlan {
  RoundingPlan arrays[Quantize::kMost];
  QuantizeStep step = QuantizeStep::kAll;
};

// Holds the place of a tile, and of a thread in the tile.
struct RoundingTile {
  int64_t first;  // the index of the thread's first element in x
  int64_t step;   // the distance to the thread's next chunk
  float* scale;
  int32_t rows;   // rows from the thread's first row on; if not positive, it has none
  int32_t chunk;  // the number of the thread's chunks in their rows

  __device__ __forceinline__ RoundingTile(const RoundingPlan& array, int32_t tile) {
    const int32_t turn = array.head_count.quotient(tile);
    const int32_t head = tile - turn * array.heads;
    const int32_t batch = array.tiles_per_batch.quotient(turn);
    const int32_t in_batch = turn - batch * array.tiles_per_batch.divisor;
    const int32_t block = array.tiles_per_block.quotient(in_batch);
    const int32_t in_block = in_batch - block * array.tiles_per_block.divisor;
    const int32_t row0 = block * array.block + in_block * kTileRows;
    const int32_t row = array.chunks.quotient(threadIdx.x);
    chunk = static_cast<int32_t>(threadIdx.x) - row * array.chunks.divisor;
    rows = min(min(array.block - in_block * kTileRows, kTileRows), array.length - row0) - row;
    if (row >= array.rows_at_once) rows = 0;
    first = ((int64_t{batch} * array.length + row0 + row) * array.heads + head) * array.head_dim +
            chunk * kChunkCols;
    step = int64_t{array.rows_at_once} * array.heads * array.head_dim;
    scale = array.scale + (array.batch_per_set > 0
                               ? batch / array.batch_per_set
                               : (int64_t{batch} * array.blocks + block) * array.heads + head);
  }
};

// Holds eight numbers in the type of the array.
template <typename Element>
struct Chunk {
  static constexpr int kWords = kChunkCols * sizeof(Element) / 4;
  uint32_t words[kWords] = {};

  __device__ __forceinline__ void load(const Element* from) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(from) + i / 4);
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  }
  __device__ __forceinline__ void get(float (&x)[kChunkCols]) const {
#pragma unroll
    for (int i = 0; i < kChunkCols; ++i) {
      if constexpr (std::is_same_v<Element, float>) {
        x[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        x[i] = __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000);
      } else {
        x[i] = __half2float(__ushort_as_half(words[i / 2] >> i % 2 * 16 & 0xffff));
      }
    }
  }
  __device__ __forceinline__ void set(const float (&x)[kChunkCols]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (std::is_same_v<Element, float>) {
        words[i] = __float_as_uint(x[i]);
      } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        words[i] = reinterpret_cast<const uint32_t&>(pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
        words[i] = reinterpret_cast<const uint32_t&>(pair);
      }
    }
  }
};

// Returns the sign of a row of the Hadamard matrix, a pseudorandom bit, like _signed_hadamard() of
// fp8.py.
__device__ __forceinline__ bool is_negative(uint32_t row, uint32_t seed) {
  uint32_t bits = row * 0x9E3779B9u + seed;
  bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
  bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
  return ((bits ^ bits >> 16) & 1) != 0;
}

__device__ __forceinline__ void find_signs(const RoundingPlan& array,
                                           uint8_t (&signs)[kWidestRounded / kChunkCols]) {
  const int chunk = threadIdx.x;
  if (chunk < array.head_dim / kChunkCols) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kChunkCols; ++i) {
      const uint32_t row = chunk * kChunkCols + i;
      bits |= uint32_t{is_negative(row, static_cast<uint32_t>(array.rotation))} << i;
    }
    signs[chunk] = static_cast<uint8_t>(bits);
  }
  __syncthreads();
}

// Rotates a chunk together with the chunks of other lanes.
template <typename Element>
__device__ __forceinline__ void rotate(const RoundingPlan& array, Chunk<Element>& chunk,
                                       uint32_t signs) {
  float x[kChunkCols];
  chunk.get(x);
#pragma unroll
  for (int i = 0; i < kChunkCols; ++i) x[i] = signs >> i & 1 ? -x[i] : x[i];
#pragma unroll
  for (int distance = 1; distance < kChunkCols; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kChunkCols; ++i) {
      if (i & distance) continue;
      const float low = x[i], high = x[i + distance];
      x[i] = low + high;
      x[i + distance] = low - high;
    }
  }
  for (int distance = 1; distance < array.rotated; distance *= 2) {
    const float sign = threadIdx.x & distance ? -1.0f : 1.0f;
#pragma unroll
    for (float& own : x) own = fmaf(sign, own, __shfl_xor_sync(0xffffffff, own, distance));
  }
#pragma unroll
  for (float& own : x) own *= array.factor;
  chunk.set(x);
}

// Returns the greatest finite magnitude of a thread's numbers.
template <typename Element>
__device__ __forceinline__ float greatest_finite(const Chunk<Element> (&chunks)[kOwnChunks]) {
  float greatest = 0.0f;
#pragma unroll
  for (const auto& chunk : chunks) {
    float x[kChunkCols];
    chunk.get(x);
#pragma unroll
    for (const float own : x) {
      const float size = fabsf(own);
      greatest = size < __int_as_float(0x7f800000) ? fmaxf(greatest, size) : greatest;
    }
  }
  return greatest;
}

// Divides a chunk by a scale, a power of two whose reciprocal is `inverse`, and rounds it.
template <typename Element>
__device__ __forceinline__ uint2 rounded(const Chunk<Element>& chunk, float inverse) {
  float x[kChunkCols];
  chunk.get(x);
  uint32_t pairs[kChunkCols / 2];
#pragma unroll
  for (float& own : x) own = fmaf(own, 0.0f, own * inverse);  // infinities become NaN
#pragma unroll
  for (int i = 0; i < kChunkCols / 2; ++i) {
    pairs[i] =
        __nv_cvt_float2_to_fp8x2(make_float2(x[2 * i], x[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
  }
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Reads a thread's chunks of a tile, and rotates them if asked to. Chunks beyond the tile are
// zeros.
template <typename Element>
__device__ __forceinline__ void load_chunks(const RoundingPlan& array, const RoundingTile& tile,
                                            Chunk<Element> (&chunks)[kOwnChunks]) {
  const auto* from = static_cast<const Element*>(array.x) + tile.first;
#pragma unroll
  for (int own = 0; own < kOwnChunks; ++own, from += tile.step) {
    if (own * array.rows_at_once < tile.rows) chunks[own].load(from);
  }
  if (array.rotation < 0) return;
  __shared__ uint8_t signs[kWidestRounded / kChunkCols];
  find_signs(array, signs);
#pragma unroll
  for (auto& chunk : chunks) rotate(array, chunk, signs[tile.chunk]);
}

// Returns a tile's scale. Step kValues reads the scale; the others compute that of the tile's own
// numbers, and store it.
template <typename Element>
__device__ __forceinline__ float find_scale(QuantizeStep step, const RoundingTile& tile,
                                            const Chunk<Element> (&chunks)[kOwnChunks]) {
  if (step == QuantizeStep::kValues) return *tile.scale;
  // Zeros get the least scale, so that they do not raise the greatest scale of the values, by which
  // P is scaled.
  const float exact = fmaxf(block_maximum(greatest_finite(chunks)) * (1.0f / 448.0f), 0x1p-126f);
  // The product of a value and a power of two is exact in 16 bits, so the backward pass has the
  // same operands as the forward pass.
  const float scale = __int_as_float((__float_as_int(exact) + 0x7fffff) & ~0x7fffff);
  if (threadIdx.x != 0) return scale;
  if (step == QuantizeStep::kAll) {
    *tile.scale = scale;
  } else {
    // Floats that are not negative have the same order as their bits.
    atomicMax(reinterpret_cast<int*>(tile.scale), __float_as_int(scale));
  }
  return scale;
}

template <typename Element>
__global__ void __launch_bounds__(kMostQuantizeThreads, 1)
    quantize_kernel(const __grid_constant__ QuantizePlan plan) {
  int32_t index = 0;
  while (static_cast<int32_t>(blockIdx.x) >= plan.arrays[index].end) ++index;
  const RoundingPlan& array = plan.arrays[index];
  const int32_t before = index == 0 ? 0 : plan.arrays[index - 1].end;
  const RoundingTile tile(array, static_cast<int32_t>(blockIdx.x) - before);
  Chunk<Element> chunks[kOwnChunks];
  load_chunks(array, tile, chunks);
  const float scale = find_scale(plan.step, tile, chunks);
  if (plan.step == QuantizeStep::kScales) return;
  const float inverse = 1.0f / scale;
  uint8_t* to = array.values + tile.first;
#pragma unroll
  for (int own = 0; own < kOwnChunks; ++own, to += tile.step) {
    if (own * array.rows_at_once >= tile.rows) break;
    *reinterpret_cast<uint2*>(to) = rounded(chunks[own], inverse);
  }
}

}  // namespace jax_flash
