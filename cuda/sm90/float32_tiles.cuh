// Prepares operands for Hopper's kernels for float32: rounds them to TF32, transposes some of them,
// and writes tiles that one plain copy each brings to shared memory (plan/float32_tiles.h).
//
// wgmma takes operands of TF32 only with a contiguous inner dimension. A tile of rows serves
// products that sum over columns, and a transposed tile those that sum over rows. The layout is
// that of a SmemTile of twice as many columns of 16 bits, whose swizzle wgmma reads. In the
// backward pass above head dim 128, a tile has two parts, each with half of the columns.
//
// The inner dimension may have any order, if both operands of a product have the same. The columns
// of a result have the order of its second operand's. Three orders save work in the kernels:
//   columns of tiles             A thread that reads an operand itself reads four contiguous
//                                columns, for two steps: of 16 columns, place 8 s + 4 e + t has
//                                column 4 t + 2 s + e.
//   rows of transposed tiles     A thread's accumulators of S or dP are its operands of the next
//                                product: of 8 rows, place 4 e + t has row 2 t + e.
//   columns of transposed tiles  A thread's accumulators of the result are four contiguous columns
//                                (Float32Rows): of 16 columns, place 8 e + 2 t + s has column
//                                4 t + 2 s + e.
//
// Keys and values that no query may attend to become zeros, and so do queries that do not exist: a
// product of NaN with a P or dS of 0 would be NaN. If all queries share the mask, the keys that it
// forbids are known here: for each tile of keys there are bits of those that some query may attend
// to. Where other modifiers may hide a key from some queries only, transposed tiles have zeros in
// place of NaN and infinity: those of V in the forward pass, and of K in the backward pass. In the
// forward pass, bits say which rows of V have any.
//
// In the backward pass, blocks of dO also compute delta = sum(dO * O) - dlse, and lse in the units
// of the logits.
//
// Roles of warps. All eight read and write a tile; the first four also find which rows take part.
// Static shared memory holds the rounded tile, and a flag for each row.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/backward_workspace.h"
#include "plan/float32_tiles.h"
#include "plan/mask_matrices.h"
#include "plan/modifiers.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/tf32.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/launch.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

inline constexpr int kTilesThreads = 256;

// Names an operand, and where its tiles go.
struct TilesOf {
  Operand from;
  bool queries = false;  // true if rows are queries, false if they are keys
  bool vectors = false;  // true if four columns can be read at a time
  bool clears = false;   // true if the transposed tile has zeros for NaN and infinity
  int32_t heads = 0, cols = 0, tiles = 0;
  // These may be null. If operands are split, `transposed` is a copy without NaN and infinity.
  float *plain = nullptr, *transposed = nullptr;
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
               float* plain, float* transposed, KeyBits* bits = nullptr) {
    const bool vectors = has_vectors(from, 4, 16) && cols % 4 == 0;
    const int32_t heads = queries ? shape.heads : shape.kv_heads;
    return of[count++] = {from,  queries, vectors,    false, heads,  cols,
                          tiles, plain,   transposed, bits,  nullptr};
  }
  int64_t blocks(const Shape& shape, int32_t parts) const {
    int64_t sum = 0;
    for (const TilesOf& operand : of) sum += shape.batch * operand.heads * operand.tiles * parts;
    return sum;
  }
};

// Describes the keys in a stage. The producer warp writes it for consumers.
struct alignas(16) Float32Keys {
  KeyBits bits;       // they arrive with the keys
  int32_t tile = 0;   // in the backward pass, of as many keys as a slot has
  bool last = false;  // true if they are the query tile's last ones
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

// Holds a tile in shared memory. Rows begin four banks apart. In each group of eight rows, chunks
// of eight columns trade places in another way, so that no access to shared memory below has bank
// conflicts.
template <int kRows, int kCols>
struct RoundedTile {
  static_assert(kCols % 32 == 0);
  alignas(16) float data[kRows][kCols + 4];

  static __device__ __forceinline__ int place(int row, int col) { return col ^ row / 8 % 4 * 8; }
  __device__ __forceinline__ float operator()(int row, int col) const {
    return data[row][place(row, col)];
  }
};

// Reads a tile of an operand into shared memory, rounded. `exists`: which rows take part.
template <int kRows, int kCols>
__device__ __forceinline__ void read_rows(const TilesOf& of, const float* from, int32_t cols,
                                          const bool (&exists)[kRows],
                                          RoundedTile<kRows, kCols>& stored) {
  constexpr int kLoads = kRows * kCols / 4 / kTilesThreads, kRowLoads = kCols / 4;
  float x[kLoads][4] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {  // all loads are in flight together
    const int place = threadIdx.x + i * kTilesThreads, col = place % kRowLoads * 4;
    const int row = place / kRowLoads;
    const float* at = from + row * of.from.row + col;
    if (!exists[row]) continue;
    if (of.vectors) {
      if (col >= cols) continue;
      const float4 four = __ldg(reinterpret_cast<const float4*>(at));
      x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (col + e < cols) x[i][e] = __ldg(at + e);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int place = threadIdx.x + i * kTilesThreads;
    const int row = place / kRowLoads, col = place % kRowLoads * 4;
    float rounded[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      rounded[e] = __uint_as_float(ptx::round_to_tf32(__float_as_uint(x[i][e])));
    }
    *reinterpret_cast<float4*>(&stored.data[row][stored.place(row, col)]) =
        make_float4(rounded[0], rounded[1], rounded[2], rounded[3]);
  }
}

// Computes lse in the units of the logits and delta = sum(dO * O) - dlse of a tile's rows. dO is
// rounded, as in dP, so that the rounding errors cancel where dP and delta nearly do. `dout` holds
// the first kCols columns of dO. The others are read from `dout_gmem`, which is null if there are
// none.
template <int kRows, int kCols>
__device__ __forceinline__ void write_statistics(const GradientStatistics& of,
                                                 const BatchIndex& batch, int64_t batch_head,
                                                 int32_t head, int32_t row0, int32_t cols,
                                                 const bool (&exists)[kRows],
                                                 const RoundedTile<kRows, kCols>& dout,
                                                 const float* dout_gmem, int64_t dout_row) {
  constexpr int kWarps = kTilesThreads / 32;
  const int lane = threadIdx.x % 32;
  const float* out = batch.pointer<const float>(of.out, head) + row0 * of.out.row;
  float sums[kRows / kWarps] = {};
#pragma unroll
  for (int i = 0; i < kRows / kWarps; ++i) {  // all loads are in flight together
    const int row = i * kWarps + threadIdx.x / 32;
    if (!exists[row]) continue;
#pragma unroll
    for (int col = 0; col < kCols; col += 32) {
      const float x = col + lane < cols ? __ldg(out + row * of.out.row + col + lane) : 0.0f;
      sums[i] = fmaf(x, __uint_as_float(__float_as_uint(dout(row, col + lane)) & ptx::kTf32Bits),
                     sums[i]);
    }
    for (int32_t col = kCols + lane; dout_gmem && col < cols; col += 32) {
      const uint32_t rounded =
          ptx::round_to_tf32(__float_as_uint(__ldg(dout_gmem + row * dout_row + col)));
      sums[i] = fmaf(__ldg(out + row * of.out.row + col), __uint_as_float(rounded & ptx::kTf32Bits),
                     sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows / kWarps; ++i) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sums[i] += __shfl_xor_sync(0xffffffff, sums[i], distance);
    }
    const int row = i * kWarps + threadIdx.x / 32;
    if (lane == 0) of.store(batch, batch_head, head, row0 + row, exists[row], sums[i]);
  }
}

// Writes a tile [rows][columns].
template <int kRows, int kCols>
__device__ __forceinline__ void write_plain(float* tile, const RoundedTile<kRows, kCols>& stored) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kCols / 4; i += kTilesThreads) {
    const int chunk = i % 8, row = i / 8 % kRows, panel = i / (8 * kRows);
    const int col = panel * 32 + chunk / 4 * 16 + chunk / 2 % 2 * 2 + chunk % 2;
    *reinterpret_cast<float4*>(tile + panel * (kRows * 32) + row * 32 + (chunk ^ row) % 8 * 4) =
        make_float4(stored(row, col), stored(row, col + 4), stored(row, col + 8),
                    stored(row, col + 12));
  }
}

// Writes a tile [columns][rows]. `clears`: NaN and infinity become zeros.
template <int kRows, int kCols>
__device__ __forceinline__ void write_transposed(float* tile, bool clears,
                                                 const RoundedTile<kRows, kCols>& stored) {
  const auto read = [&](int row, int col) {
    const float x = stored(row, col);
    return clears && !is_finite(x) ? 0.0f : x;
  };
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kCols / 4; i += kTilesThreads) {
    const int chunk = i % 8, col = i / 8 % kCols, panel = i / (8 * kCols);
    const int place = col / 16 * 16 + col % 2 * 8 + col / 4 % 4 * 2 + col / 2 % 2;
    const int row = panel * 32 + chunk / 2 * 8 + chunk % 2;
    *reinterpret_cast<float4*>(tile + panel * (kCols * 32) + place * 32 + (chunk ^ place) % 8 * 4) =
        make_float4(read(row, col), read(row + 2, col), read(row + 4, col), read(row + 6, col));
  }
}

// Returns whether a row has NaN or infinity: zero times either is NaN, and so is the sum. The order
// of the columns depends on the row, against bank conflicts.
template <int kRows, int kCols>
__device__ __forceinline__ bool is_bad(const RoundedTile<kRows, kCols>& stored, int row) {
  float zero = 0.0f;
#pragma unroll 4
  for (int col = 0; col < kCols; ++col) zero = fmaf(0.0f, stored(row, col ^ row / 8 % 4), zero);
  return zero != 0.0f;
}

// Writes bits of a tile of keys: those of this thread's row. Called by the first four warps.
template <int kRows>
__device__ __forceinline__ void write_bits(KeyBits* bits, bool is_set) {
  static_assert(kRows <= 128);
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

// Grid: for each operand, kParts blocks for each of its tiles, with kCols columns each. These vary
// fastest, then heads, so that neighbours in memory are read at the same time.
template <int kRows, int kCols, int kParts>
__global__ void __launch_bounds__(kTilesThreads, 4)
    float32_tiles_kernel(const __grid_constant__ Forward params,
                         const __grid_constant__ AllTiles all) {
  ptx::griddepcontrol_launch_dependents();
  __shared__ RoundedTile<kRows, kCols> stored;
  __shared__ bool exists[kRows];
  if (all.counter && blockIdx.x == 0 && threadIdx.x == 0) *all.counter = 0;
  const TilePlace place(params.shape, all, kParts);
  const TilesOf& of = all.of[place.operand];
  const int32_t row0 = place.tile * kRows, col0 = place.part * kCols;
  const int64_t first = (place.index * kParts + place.part) * kRows * kCols;
  const BatchIndex batch(params.shape, place.batch);
  if (threadIdx.x < 128) {
    const int row = threadIdx.x;
    const bool own = row < kRows && takes_part(params, of, all.has_key_mask, batch,
                                               Band(params, batch), place.head, row0 + row);
    if (row < kRows) exists[row] = own;
    if (of.bits && place.part == 0) write_bits<kRows>(of.bits + place.index, own);
  }
  __syncthreads();
  const float* from = batch.pointer<const float>(of.from, place.head) + row0 * of.from.row;
  read_rows<kRows, kCols>(of, from + col0, of.cols - col0, exists, stored);
  __syncthreads();
  if (of.bad && threadIdx.x < 128) {
    write_bits<kRows>(of.bad + place.index,
                      threadIdx.x < kRows && is_bad(stored, static_cast<int>(threadIdx.x)));
  }
  if (place.operand == all.dout && place.part == 0) {
    write_statistics<kRows, kCols>(all.statistics, batch, place.batch_head, place.head, row0,
                                   of.cols, exists, stored, kParts > 1 ? from : nullptr,
                                   of.from.row);
  }
  if (of.plain) write_plain<kRows, kCols>(of.plain + first, stored);
  if (of.transposed) write_transposed<kRows, kCols>(of.transposed + first, of.clears, stored);
}

// kParts: the number of parts of kCols columns that a tile has in the workspace.
template <int kRows, int kCols, int kParts = 1>
Status launch_float32_tiles(const Forward& params, const AllTiles& all, cudaStream_t stream) {
  return launch_kernel("sm90::float32_tiles_kernel", params.shape,
                       float32_tiles_kernel<kRows, kCols, kParts>, all.blocks(params.shape, kParts),
                       kTilesThreads, 0, stream, params, all);
}

}  // namespace jax_flash::sm90
