// Prepares operands for Hopper's kernels for float32: writes each number as one or two of float16
// (ptx/split.cuh), in tiles that one plain copy each brings to shared memory
// (plan/float32_tiles.h).
//
// A tile has the layout of a SmemTile; if there are two numbers, it has twice as many columns: all
// greater parts come first, then the rests. wgmma reads it in both orders, so nothing is
// transposed. Where two blocks divide the columns in the backward pass, a tile has two parts, each
// with half of them. The numbers of a row, or of its part, are multiplied by the same power of two.
//
// The columns of a product's inner dimension may have any order, if both operands have the same;
// those of a result have that of its second operand. Here, of 16 columns, place 8 e + 2 t + s has
// column 4 t + 2 s + e: a thread that reads operands itself reads four contiguous columns, and its
// accumulators of a result are four contiguous columns (Float32Rows).
//
// Keys and values that no query may attend to become zeros, and so do queries that do not exist: a
// product of NaN with a P or dS of 0 would be NaN. If all queries share the mask, the keys that it
// forbids are known here: for each tile of keys there are bits of those that some query may attend
// to. Where other modifiers may hide a key from some queries only, NaN and infinity become zeros in
// tiles of V in the forward pass, and in a second copy of K in the backward pass, which dQ reads.
// In the forward pass, bits say which rows of V have any.
//
// In the backward pass, blocks of dO also compute delta = sum(dO * O) - dlse, and lse in the units
// of the logits.
//
// Each thread writes 16 columns of a row. Static shared memory holds two flags for each row.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/float32_tiles.h"
#include "plan/mask_matrices.h"
#include "plan/modifiers.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/split.cuh"
#include "ptx/tf32.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Names an operand, and where its tiles go.
struct TilesOf {
  Operand from;
  bool queries = false;  // true if rows are queries, false if they are keys
  bool vectors = false;  // true if four columns can be read at a time
  int32_t heads = 0, cols = 0, tiles = 0;
  float unit = 1.0f;  // the magnitudes are multiplied by it
  // These may be null. `finite` has zeros in place of NaN and infinity.
  float *all = nullptr, *finite = nullptr;
  KeyBits* bits = nullptr;
  KeyBits* bad = nullptr;  // if not null, gets a bit for each row with NaN or infinity
};
// Holds what the backward pass knows of rows. `out`, `lse` and `dlse` are operands, `lse_log2`
// and `delta` are those of BackwardWorkspace.
struct GradientStatistics {
  Operand out, lse, dlse;
  float *lse_log2 = nullptr, *delta = nullptr;
  int32_t rows = 0;     // per head
  float factor = 1.0f;  // from lse to the units of the logits

  GradientStatistics() = default;
  GradientStatistics(const Backward& params, const BackwardWorkspace& workspace)
      : out(params.out),
        lse(params.lse),
        dlse(params.dlse),
        lse_log2(workspace.lse_log2),
        delta(workspace.delta),
        rows(workspace.rows),
        factor(adds_to_logits(params) ? 1.0f : kLog2E) {}

  // Stores lse and delta of a row, if it exists. `takes_part`: whether it has results. `sum`: that
  // of dO * O.
  __device__ __forceinline__ void store(const BatchIndex& batch, int64_t batch_head, int32_t head,
                                        int32_t row, bool takes_part, float sum) const {
    if (row >= rows) return;
    const float own =
        takes_part ? batch.pointer<const float>(lse, head)[row * lse.row] : minus_infinity();
    const bool dead = own == minus_infinity();
    float difference = dead ? 0.0f : sum;
    if (dlse && !dead) difference -= batch.pointer<const float>(dlse, head)[row * dlse.row];
    lse_log2[batch_head * rows + row] = dead ? -minus_infinity() : own * factor;
    delta[batch_head * rows + row] = difference;
  }
};
struct AllTiles {
  static constexpr int kMost = 4;
  TilesOf of[kMost];
  int32_t count = 0;
  int32_t* counter = nullptr;  // if not null, the kernel sets it to 0
  int dout = -1;               // the index of dO among the operands, in the backward pass
  bool has_key_mask = false;   // true if all queries of a group share the mask
  GradientStatistics statistics;

  explicit AllTiles(const Forward& params) : has_key_mask(key_block_has_one_mask(params)) {}
  TilesOf& add(const Shape& shape, const Operand& from, bool queries, int32_t cols, int32_t tiles,
               float* all, float* finite, KeyBits* bits = nullptr) {
    const bool vectors = has_vectors(from, 4, 16) && cols % 4 == 0;
    const int32_t heads = queries ? shape.heads : shape.kv_heads;
    return of[count++] = {from, queries, vectors, heads, cols,   tiles,
                          1.0f, all,     finite,  bits,  nullptr};
  }
  int64_t blocks(const Shape& shape, int32_t parts) const {
    int64_t sum = 0;
    for (const TilesOf& operand : of) sum += shape.batch * operand.heads * operand.tiles * parts;
    return sum;
  }
};

// Describes the keys in a stage. The producer warp writes it for consumers.
template <int kTiles>
struct alignas(16) Float32Keys {
  KeyBits bits[kTiles];  // they arrive with the keys
  int32_t tile = 0;      // in the backward pass, of as many keys as a slot has
  bool last = false;     // true if they are the query tile's last ones
};

// Returns whether a row takes part in products.
__device__ __forceinline__ bool takes_part(const Forward& params, const TilesOf& of,
                                           bool has_key_mask, const BatchIndex& batch,
                                           const Band& band, int32_t head, int32_t row) {
  if (of.queries) return row < band.q_len;
  if (row >= band.kv_len || band.first_row(row) >= band.end_row(row + 1)) return false;
  if (!has_key_mask) return true;
  // If the mask differs among heads, each key/value head has one query head.
  return batch.pointer<const uint8_t>(params.mask, head)[row * params.mask.col];
}

inline constexpr int kThreadCols = 16;  // of a thread

// Reads this thread's columns, of which `cols` exist.
__device__ __forceinline__ void read_columns(float (&x)[kThreadCols], const float* from,
                                             int32_t cols, bool vectors) {
#pragma unroll
  for (int i = 0; i < kThreadCols; i += 4) {
    if (vectors) {
      if (i >= cols) continue;
      const float4 four = __ldg(reinterpret_cast<const float4*>(from + i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (i + e < cols) x[i + e] = __ldg(from + i + e);
      }
    }
  }
}

// Writes this thread's columns of a tile of kCols columns, times `factor`: those from `col` on.
template <int kCols, int kNumbers>
__device__ __forceinline__ void write_columns(float* tile, int row, int col,
                                              const float (&x)[kThreadCols], float factor) {
  constexpr int kPanelBytes = kTileRows * 128, kPanels = kCols / 64;
  uint32_t words[2][4][kNumbers];  // of places 8 e + 2 t on
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      ptx::split(x[4 * t + e] * factor, x[4 * t + 2 + e] * factor, words[e][t]);
    }
  }
  uint8_t* const to = reinterpret_cast<uint8_t*>(tile) + col / 64 * kPanelBytes + row * 128;
#pragma unroll
  for (int number = 0; number < kNumbers; ++number) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int chunk = col % 64 / 8 + e;
      *reinterpret_cast<uint4*>(to + number * kPanels * kPanelBytes + (chunk ^ row) % 8 * 16) =
          make_uint4(words[e][0][number], words[e][1][number], words[e][2][number],
                     words[e][3][number]);
    }
  }
}

// Returns the power of two for a row's numbers, of which this thread has `x`. kThreads neighbouring
// threads share the row.
template <int kThreads>
__device__ __forceinline__ float factor_of_row(const float (&x)[kThreadCols]) {
  float greatest = 0.0f;
#pragma unroll
  for (float value : x) {
    if (is_finite(value)) greatest = fmaxf(greatest, fabsf(value));
  }
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffff, greatest, distance));
  }
  return ptx::split_factor(greatest);
}

// Computes lse in the units of the logits and delta = sum(dO * O) - dlse of a row. With one number,
// dO is rounded, nearly as in dP, so that the errors cancel where dP and delta nearly do.
// kThreads neighbouring threads share the row, whose first column is `dout`. `exists`: whether it
// takes part.
template <int kThreads, int kNumbers>
__device__ __forceinline__ void write_row_statistics(const GradientStatistics& of,
                                                     const BatchIndex& batch, int64_t batch_head,
                                                     int32_t head, int32_t row, int32_t cols,
                                                     bool exists, const float* dout) {
  float sum = 0.0f;
  const float* out = batch.pointer<const float>(of.out, head) + row * of.out.row;
  for (int32_t col = threadIdx.x % kThreads; exists && col < cols; col += kThreads) {
    float x = __ldg(dout + col);
    if (kNumbers == 1) {  // TF32 has as many significant bits as float16
      x = __uint_as_float(ptx::round_to_tf32(__float_as_uint(x)) & ptx::kTf32Bits);
    }
    sum = fmaf(x, __ldg(out + col), sum);
  }
#pragma unroll
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (threadIdx.x % kThreads == 0) of.store(batch, batch_head, head, row, exists, sum);
}

// Writes bits of a tile of keys: those of this thread's row. Called by the first four warps.
__device__ __forceinline__ void write_bits(KeyBits* bits, bool is_set) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t keys = __ballot_sync(0xffffffff, is_set);
  uint32_t own = 0;  // those of this warp in a word
#pragma unroll
  for (int n = 0; n < 4; ++n) own |= (keys >> (8 * n + lane % 4 * 2) & 3) << 2 * n;
  if (lane < 4) reinterpret_cast<uint8_t*>(&bits->words[lane])[warp] = static_cast<uint8_t>(own);
}

// Returns the last key tile in [first, end) with a key that some query may attend to, or first - 1.
// Called by whole warps. `bits`: those of the head's first tile.
__device__ __forceinline__ int32_t last_key_tile(const KeyBits* bits, int32_t first, int32_t end) {
  for (; end > first; end -= 32) {
    const int32_t mine = end - 1 - static_cast<int32_t>(threadIdx.x % 32);
    uint4 words = {};
    if (mine >= first) words = *reinterpret_cast<const uint4*>(bits + mine);
    const uint32_t votes = __ballot_sync(0xffffffff, (words.x | words.y | words.z | words.w) != 0);
    if (votes) return end - __ffs(votes);
  }
  return first - 1;
}

// Says what a block works on.
struct TilePlace {
  int operand = 0;
  int32_t part, head, batch, tile;
  int64_t batch_head, index;  // index: of the tile in the workspace

  __device__ __forceinline__ TilePlace(const Shape& shape, const AllTiles& all, int32_t parts) {
    auto block = static_cast<int32_t>(blockIdx.x);
    for (;; ++operand) {
      const TilesOf& of = all.of[operand];
      const int32_t blocks = static_cast<int32_t>(shape.batch) * of.heads * of.tiles * parts;
      if (block < blocks) break;
      block -= blocks;
    }
    const TilesOf& of = all.of[operand];
    part = block % parts;
    block /= parts;
    const int32_t turn = block / of.heads;
    head = block - turn * of.heads;
    batch = turn / of.tiles;
    tile = turn - batch * of.tiles;
    batch_head = int64_t{batch} * of.heads + head;
    index = batch_head * of.tiles + tile;
  }
};

// The threads of a block, which writes a tile, or a part of one.
template <int kCols>
inline constexpr int kTilesThreads = kTileRows * kCols / kThreadCols;

// Grid: for each operand, kParts blocks for each of its tiles, with kCols columns each. These vary
// fastest, then heads, so that neighbours in memory are read at the same time.
template <int kCols, int kParts, int kNumbers>
__global__ void __launch_bounds__(kTilesThreads<kCols>)
    float32_tiles_kernel(const __grid_constant__ Forward params,
                         const __grid_constant__ AllTiles all) {
  constexpr int kRowThreads = kCols / kThreadCols;
  static_assert(kTilesThreads<kCols> >= 128);
  ptx::griddepcontrol_launch_dependents();
  __shared__ bool exists[kTileRows], bad[kTileRows];
  if (all.counter && blockIdx.x == 0 && threadIdx.x == 0) *all.counter = 0;
  const TilePlace place(params.shape, all, kParts);
  const TilesOf& of = all.of[place.operand];
  const int32_t row0 = place.tile * kTileRows;
  const BatchIndex batch(params.shape, place.batch);
  if (threadIdx.x < 128) {
    const int row = threadIdx.x;
    const bool own = row < kTileRows && takes_part(params, of, all.has_key_mask, batch,
                                                   Band(params, batch), place.head, row0 + row);
    if (row < kTileRows) {
      exists[row] = own;
      bad[row] = false;
    }
    if (of.bits && place.part == 0) write_bits(of.bits + place.index, own);
  }
  __syncthreads();
  const int row = threadIdx.x / kRowThreads, col = threadIdx.x % kRowThreads * kThreadCols;
  const float* from = batch.pointer<const float>(of.from, place.head) + (row0 + row) * of.from.row;
  const int32_t first_col = place.part * kCols + col;
  float x[kThreadCols] = {};
  if (exists[row]) read_columns(x, from + first_col, of.cols - first_col, of.vectors);
  const float factor = factor_of_row<kRowThreads>(x);
  const auto write = [&](float* tiles) {
    constexpr int kFloats = tile_floats(kCols, kNumbers);
    float* const tile = tiles + (place.index * kParts + place.part) * kFloats;
    write_columns<kCols, kNumbers>(tile, row, col, x, factor);
    if (col == 0) tile[kFloats - kTileRows + row] = ptx::split_magnitude(factor) * of.unit;
  };
  if (of.all) write(of.all);
  if (of.finite) {
#pragma unroll
    for (float& value : x) {
      if (is_finite(value)) continue;
      bad[row] = true;
      value = 0.0f;
    }
    write(of.finite);
  }
  if (place.operand == all.dout && place.part == 0) {
    write_row_statistics<kRowThreads, kNumbers>(all.statistics, batch, place.batch_head, place.head,
                                                row0 + row, of.cols, exists[row], from);
  }
  if (!of.bad) return;
  __syncthreads();
  if (threadIdx.x < 128) {
    write_bits(of.bad + place.index, threadIdx.x < kTileRows && bad[threadIdx.x]);
  }
}

// kParts: the number of parts of kCols columns that a tile has in the workspace.
template <int kCols, int kParts, int kNumbers>
Status launch_tiles(const Forward& params, const AllTiles& all, cudaStream_t stream) {
  return launch_kernel(
      "sm90::float32_tiles_kernel", params.shape, float32_tiles_kernel<kCols, kParts, kNumbers>,
      all.blocks(params.shape, kParts), kTilesThreads<kCols>, 0, stream, params, all);
}

}  // namespace jax_flash::sm90
