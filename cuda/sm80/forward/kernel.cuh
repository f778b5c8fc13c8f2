// Computes the forward pass with warp-level matrix instructions (mma.sync), after FlashAttention-2
// (arXiv:2307.08691).
//
//   for each tile of keys and values that some row of the block may attend to
//     S = Q K^T
//     P = 2^(scale log2(e) S - m)   m: the row's running maximum, in log2 units
//     O = O 2^(m_old - m) + P V     accumulators of S become operands within a thread
//   out = O / l, lse = (m + log2 l) / log2(e)     l: the row's sum of P
//
// A thread block computes a query tile of one head. All of its warps do the same work, each on
// its own 16 Config::kMTiles rows. They synchronize only when a tile of K or V arrives or its
// memory becomes free. All threads start the copies with cp.async, and the warps compute meanwhile:
// with two stages, K and V of the next tile are copied during the current one; with one stage, V
// during Q K^T and the next K during the softmax and P V.
//
// Shared memory: Q, later out | kStages tiles of K | kStages tiles of V
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/logits.cuh"
#include "modifiers/scores.cuh"
#include "modifiers/segments.cuh"
#include "modifiers/sinks.cuh"
#include "params.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"
#include "sm80/config.cuh"
#include "sm80/products.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/block_place.cuh"
#include "tile/element.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// Walks over the key tiles that a block reads, in order. With segments, skips tiles.
struct KeyTileWalk {
  int32_t tile, end;
  const SegmentSpan* key_spans = nullptr;  // spans of this batch, or null
  int32_t key_blocks = 0;
  SegmentSpan query_span = {};

  template <int kBlockKv>
  __device__ __forceinline__ int32_t skip_to(int32_t candidate) const {
    if (!key_spans) return candidate;
    return next_tile<kBlockKv>(key_spans, key_blocks, query_span, candidate, end);
  }
};

// Returns a bit per column of this thread in the tile, the e-th of its two in the n-th 8 columns.
// A bit is set if some row of this warp may attend to the column. Lanes with the same lane % 4 have
// the same columns, and hold the same rows of V in operand fragments. Other rows of V have P = 0,
// but may hold NaN, so they must be cleared.
template <int kM, int kN>
__device__ __forceinline__ uint32_t attended_columns(const float (&logits)[kM][kN][4]) {
  uint32_t bits = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      bool any = false;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        any |= logits[m][n][e] != minus_infinity() || logits[m][n][e + 2] != minus_infinity();
      }
      bits |= static_cast<uint32_t>(any) << (2 * n + e);
    }
  }
  for (int distance = 4; distance < 32; distance *= 2) {
    bits |= __shfl_xor_sync(0xffffffff, bits, distance);
  }
  return bits;
}

// Stores a warp's rows of out. 16-bit elements are staged in shared memory, so that a lane stores
// 16 bytes at a time.
template <typename Config, typename Element, int kM, int kN>
__device__ __forceinline__ void store_out(const Forward& params, const BatchIndex& batch,
                                          int32_t head, int32_t row0,
                                          const typename Config::OutTile& out_smem,
                                          const float (&out)[kM][kN][4]) {
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * kM * 16;
  if constexpr (kIsFloat32<Element>) {
    const Float32Rows rows(batch.pointer<float>(params.out, head), params.out.row,
                           params.shape.value_dim);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = row0 + warp_row + fragment_row(m, 2 * half);
        if (row < params.shape.q_len) rows.store(row, half, out[m]);
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::st_shared_b32(
              out_smem.address(warp_row + fragment_row(m, 2 * half), n) + lane % 4 * 4,
              ptx::cvt_rn_x2<Element>(out[m][n][2 * half], out[m][n][2 * half + 1]));
        }
      }
    }
    __syncwarp();
    Element* out_gmem = batch.pointer<Element>(params.out, head);
#pragma unroll
    for (int row = lane / 8; row < kM * 16; row += 4) {
      const int32_t global_row = row0 + warp_row + row;
      if (global_row >= params.shape.q_len) break;
#pragma unroll
      for (int chunk = lane % 8; chunk < Config::kValueDim / kChunk; chunk += 8) {
        if (chunk * kChunk >= params.shape.value_dim) break;
        *reinterpret_cast<uint4*>(out_gmem + global_row * params.out.row + chunk * kChunk) =
            ptx::ld_shared_v4(out_smem.address(warp_row + row, chunk));
      }
    }
  }
}

// Finds the query tiles that have a row with extreme logits. A block searches every gridDim.x-th
// tile, 32 of them at a time. The search sets lse_low of all rows to 0, which is nearly exact for
// other rows; attend() overwrites it in the tiles that are found.
template <typename Config>
class ExtremeTiles {
 public:
  // Sets the index of the next tile; returns false if there is none. Called by all threads of a
  // block, while none of them uses shared memory.
  __device__ __forceinline__ bool next(const Forward& params, uint32_t& index) {
    __shared__ uint32_t found_smem;
    const int64_t stride = gridDim.x, count = QueryTilePlace<Config::kBlockQ>::count(params.shape);
    while (found_ == 0) {
      first_ = first_ < 0 ? blockIdx.x : first_ + 32 * stride;
      if (first_ >= count) return false;
      __syncthreads();
      if (threadIdx.x == 0) found_smem = 0;
      __syncthreads();
      for (int i = threadIdx.x / 32; i < 32 && first_ + i * stride < count; i += Config::kWarps) {
        const bool found = look_at(params, static_cast<uint32_t>(first_ + i * stride));
        if (__any_sync(0xffffffff, found) && threadIdx.x % 32 == 0) atomicOr(&found_smem, 1u << i);
      }
      __syncthreads();
      found_ = found_smem;
    }
    const int i = __ffs(found_) - 1;
    found_ &= found_ - 1;
    index = static_cast<uint32_t>(first_ + i * stride);
    return true;
  }

 private:
  static __device__ __forceinline__ bool look_at(const Forward& params, uint32_t index) {
    constexpr int kBlockQ = Config::kBlockQ;
    const Shape& shape = params.shape;
    const QueryTilePlace<kBlockQ> at(params, index, Config::kLongestFirst);
    const BatchIndex batch(shape, at.batch_index);
    const float* lse = batch.pointer<const float>(params.lse, at.head);
    float* lse_low = batch.pointer<float>(params.lse_low, at.head);
    const int32_t end = min((at.tile + 1) * kBlockQ, shape.q_len),
                  q_len = Band(params, batch).q_len;
    bool found = false;
    for (int32_t row = at.tile * kBlockQ + threadIdx.x % 32; row < end; row += 32) {
      lse_low[row * params.lse_low.row] = 0.0f;
      found |= row < q_len && needs_exact_logits(lse[row * params.lse.row]);
    }
    return found;
  }

  int64_t first_ = -1;
  uint32_t found_ = 0;  // a bit for each of 32 tiles from first_ on
};

// Returns the places of a block's tiles in shared memory.
template <typename Config>
struct ForwardTiles {
  uint32_t base;

  __device__ __forceinline__ typename Config::QueryTile query() const { return {base, 0}; }
  __device__ __forceinline__ typename Config::OutTile out() const { return {base, 0}; }
  __device__ __forceinline__ typename Config::KeyTile key(uint32_t stage) const {
    return {base, Config::kKeyOffset + stage * Config::KeyTile::kBytes};
  }
  __device__ __forceinline__ typename Config::ValueTile value(uint32_t stage) const {
    return {base, Config::kValueOffset + stage * Config::ValueTile::kBytes};
  }
};

// Copies tiles of queries, keys and values of one head for a block of rows from row0 on.
template <typename Config, typename Element, typename Tiles = ForwardTiles<Config>>
struct TileLoader {
  const Forward& params;
  const Tiles& tiles;
  const Band& band;
  int32_t row0;

  // Called by all threads of the block, before anything is loaded.
  __device__ __forceinline__ void set_head(const BatchIndex& batch, int32_t kv_head) const {
    if (threadIdx.x == 0) {
      key_gmem() = batch.pointer<const Element>(params.key, kv_head);
      value_gmem() = batch.pointer<const Element>(params.value, kv_head);
    }
    __syncthreads();
  }
  // Start copying a tile.
  __device__ __forceinline__ void load_query(const BatchIndex& batch, int32_t head) const {
    load_tile<Config::kThreads>(tiles.query(), batch.pointer<const Element>(params.query, head),
                                params.query.row, row0, row0,
                                min(row0 + Config::kBlockQ, band.q_len), params.shape.head_dim);
  }
  __device__ __forceinline__ void load_key(int32_t tile, int stage) const {
    load(tiles.key(stage), key_gmem(), params.key.row, tile, params.shape.head_dim);
  }
  __device__ __forceinline__ void load_value(int32_t tile, int stage) const {
    load(tiles.value(stage), value_gmem(), params.value.row, tile, params.shape.value_dim);
  }

 private:
  // The pointers are used once per tile. They are in shared memory, because registers are scarce.
  static __device__ __forceinline__ const Element*& key_gmem() {
    __shared__ const Element* pointer;
    return pointer;
  }
  static __device__ __forceinline__ const Element*& value_gmem() {
    __shared__ const Element* pointer;
    return pointer;
  }
  // Keys that no row of the block may attend to become zeros: see load_tile().
  template <typename Tile>
  __device__ __forceinline__ void load(const Tile& to, const Element* gmem, int64_t stride,
                                       int32_t tile, int32_t cols) const {
    const int32_t last_row = min(row0 + Config::kBlockQ, band.q_len) - 1;
    load_tile<Config::kThreads>(to, gmem, stride, tile * Config::kBlockKv, band.first_col(row0),
                                band.end_col(last_row), cols);
  }
};

// Lets a walk skip key tiles that have no segment in common with the query tile.
template <int kBlockQ>
__device__ __forceinline__ void skip_other_segments(KeyTileWalk& walk, const SegmentSpans& spans,
                                                    int64_t batch_index, int32_t q_tile) {
  walk.key_blocks = spans.key_blocks;
  walk.key_spans = spans.key + batch_index * spans.key_blocks;
  walk.query_span = tile_span<kBlockQ>(spans.query + batch_index * spans.query_blocks,
                                       spans.query_blocks, q_tile);
}

// Waits until copies to shared memory of all threads of the block have arrived.
__device__ __forceinline__ void wait_for_copies() {
  ptx::cp_async_wait_group<0>();
  __syncthreads();
}

// Waits until copies of these tiles have arrived. For TF32 products, each thread first rounds the
// elements that it has copied itself; to round operand fragments instead would repeat this work in
// every warp.
template <typename Config, typename Element, typename... Tiles>
__device__ __forceinline__ void wait_for_tiles(const Tiles&... tiles) {
  if constexpr (std::is_same_v<Element, Tf32>) {
    ptx::cp_async_wait_group<0>();
    (round_own_chunks<Config::kThreads>(tiles), ...);
  }
  wait_for_copies();
}

// Reads a warp's rows of the query tile as operand fragments.
template <typename Tile, int kM, int kSteps>
__device__ __forceinline__ void read_query(uint32_t (&fragments)[kM][kSteps][4], const Tile& tile) {
  const BlockReader reader(tile, BlockOrder::kRowsFirst, threadIdx.x / 32 * kM * 16, 0);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ptx::ldmatrix_x4(fragments[m][k], reader.at(m * 16, k * 2));
  }
}

// S = Q K^T. Q is read from registers if Config::kQueryInRegisters, and otherwise from its tile.
template <typename Config, typename Element, int kM, int kN, int kQueryM, int kSteps>
__device__ __forceinline__ void multiply_query_key(float (&logits)[kM][kN][4],
                                                   const uint32_t (&query_rmem)[kQueryM][kSteps][4],
                                                   const typename Config::QueryTile& query_smem,
                                                   const typename Config::KeyTile& key_smem) {
  const BlockReader query_reader(query_smem, BlockOrder::kRowsFirst, threadIdx.x / 32 * kM * 16, 0);
  set_zero(logits);
  const BlockReader key_reader(key_smem, BlockOrder::kColsFirst, 0, 0);
  matmul<Element, kSteps, kRoundedA | kRoundedB | kRolled>(
      logits,
      [&](uint32_t (&a)[4], int m, int k) {
        if constexpr (Config::kQueryInRegisters) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = query_rmem[m][k][i];
        } else {
          ptx::ldmatrix_x4(a, query_reader.at(m * 16, k * 2));
        }
      },
      [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, key_reader.at(n * 8, k * 2)); });
}

// Turns a tile's products into logits; pairs that are not allowed get -inf. Returns the bits of
// attended_columns(), or all bits if no row of V has to be cleared.
template <typename Config, typename Element, bool kGeneral, int kM, int kN>
__device__ __forceinline__ uint32_t mask_logits(float (&logits)[kM][kN][4], const Forward& params,
                                                const BatchIndex& batch, int32_t head,
                                                const Band& band, int32_t row0, int32_t warp_row0,
                                                int32_t col0) {
  if constexpr (kGeneral && kIsFloat32<Element>) {
    modify_tile(logits, params, batch, head, band, warp_row0, col0);
    return attended_columns(logits);
  } else if constexpr (kGeneral) {
    const LogitModifiers modifiers(params, batch, head);
    modifiers.apply(logits, band, warp_row0, col0);
    return attended_columns(logits);
  } else if (!band.all_allowed(row0, min(row0 + Config::kBlockQ, band.q_len), col0,
                               col0 + Config::kBlockKv)) {
    mask_band(logits, band, warp_row0, col0);
  }
  return 0xffffffff;
}

// Finds which elements of a warp's rows dropout keeps.
template <int kN, int kM>
__device__ __forceinline__ void find_kept(Kept (&kept)[kM], const LogitModifiers& modifiers,
                                          int32_t row0, int32_t col0) {
#pragma unroll
  for (int m = 0; m < kM; ++m) kept[m] = modifiers.template kept<kN>(row0 + m * 16, col0);
}

// P = 2^(scale log2(e) S - m), and 0 for dropped elements; then O += P V. Rows of V that no row of
// the warp attends to are cleared.
template <typename Config, typename Element, bool kGeneral, int kM, int kN, int kOutN, int kKeptM>
__device__ __forceinline__ void multiply_probability_value(
    float (&out)[kM][kOutN][4], float (&logits)[kM][kN][4], OnlineSoftmax<kM, kGeneral>& softmax,
    float to_log2, bool drops, const Kept (&kept)[kKeptM], uint32_t attended,
    const typename Config::ValueTile& value_smem) {
  const auto exponentials = [&](int m, int n) {
    softmax.exponentials(logits[m][n], m, to_log2);
    if constexpr (kGeneral) {
      if (!drops) return;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!kept[m].template at<false>(n, e)) logits[m][n][e] = 0.0f;
      }
    }
  };
  if constexpr (!Config::kInterleaved) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) exponentials(m, n);
    }
  }

  if constexpr (kIsFloat32<Element>) {
    // The sum over keys may have any order. So the accumulator columns 2 t and 2 t + 1, which a
    // thread holds, serve as operand columns t and t + 4, and rows of V are read in that order.
    const TransposedReader<typename Config::ValueTile, StepOrder::kPaired> reader(value_smem, 0, 0);
    matmul<Element, kN, kRoundedA | (Config::kRoundsTiles ? kRoundedB : 0)>(
        out,
        [&](uint32_t (&a)[4], int m, int k) {
          if constexpr (Config::kInterleaved) exponentials(m, k);
          constexpr int kElement[4] = {0, 2, 1, 3};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            a[i] = __float_as_uint(logits[m][k][kElement[i]]);
            // Rounds to TF32. This may lose a NaN, but then the row's sum of exponentials is NaN.
            if constexpr (std::is_same_v<Element, Tf32>) a[i] += ptx::kHalfTf32;
          }
        },
        [&](uint32_t (&b)[4], int n, int k) {
          reader.read_b(b, k * 8, n * 2);
          if constexpr (kGeneral) {
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = attended >> (2 * k + i % 2) & 1 ? b[i] : 0;
          }
        });
  } else {
    const BlockReader value_reader(value_smem, BlockOrder::kRowsFirst, 0, 0);
    matmul<Element, kN / 2>(
        out,
        [&](uint32_t (&a)[4], int m, int k) {
          if constexpr (Config::kInterleaved) {
            exponentials(m, 2 * k);
            exponentials(m, 2 * k + 1);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float (&block)[4] = logits[m][2 * k + i / 2];
            a[i] = ptx::cvt_rn_x2<Element>(block[i % 2 * 2], block[i % 2 * 2 + 1]);
          }
        },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(b, value_reader.at(k * 16, n));
          if constexpr (kGeneral) {
#pragma unroll
            for (int i = 0; i < 4; ++i) b[i] = keep_halves(b[i], attended >> (4 * k + i % 2 * 2));
          }
        });
  }
}

// Replaces O by out = O / l, and stores lse and lse_low.
template <typename Element, bool kGeneral, int kM, int kOutN>
__device__ __forceinline__ void finish_rows(float (&out)[kM][kOutN][4],
                                            const OnlineSoftmax<kM, kGeneral>& softmax,
                                            float to_log2, const Forward& params,
                                            const BatchIndex& batch, int32_t head,
                                            int32_t warp_row0, const Band& band) {
  constexpr bool kExact = std::is_same_v<Element, Tf32x3>;
  const float sink =  // has the units of logits
      read_sink(bool{params.sinks}, batch.pointer<const float>(params.sinks, head),
                !kGeneral || !in_natural_units(params));
  float* lse_gmem = batch.pointer<float>(params.lse, head);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = warp_row0 + fragment_row(m, 2 * half);
      float lse, lse_low = 0.0f, normalizer;
      if constexpr (kGeneral) {
        softmax.template finish<kExact>(m, half, to_log2, sink, lse, lse_low, normalizer);
      } else {
        softmax.template finish<kExact>(m, half, to_log2, sink, lse, normalizer);
      }
      if (row >= band.q_len) {
        lse = minus_infinity();
        lse_low = normalizer = 0.0f;
      }
      if (threadIdx.x % 4 == 0 && row < params.shape.q_len) {
        lse_gmem[row * params.lse.row] = lse;
        if (kGeneral && params.lse_low) {
          batch.pointer<float>(params.lse_low, head)[row * params.lse_low.row] = lse_low;
        }
      }
      if (kGeneral) normalizer *= params.options.dropout_scale;
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          out[m][n][e] = normalizer == 0.0f ? 0.0f : out[m][n][e] * normalizer;
        }
      }
    }
  }
}

// Computes out and lse of query tile number `index`.
template <typename Config, typename Element, bool kGeneral>
__device__ __forceinline__ void attend(const Forward& params, const SegmentSpans& spans,
                                       uint32_t index) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv, kM = Config::kMTiles;
  const Shape& shape = params.shape;
  const QueryTilePlace<kBlockQ> at(params, index, Config::kLongestFirst);
  const BatchIndex batch(shape, at.batch_index);
  const int32_t row0 = at.tile * kBlockQ, warp_row0 = row0 + threadIdx.x / 32 * kM * 16;
  const Band band(params, batch);
  const Range range = kv_tiles<kBlockKv>(band, row0, row0 + kBlockQ);
  KeyTileWalk walk = {range.first, range.end};
  if (kGeneral && spans.query) {
    skip_other_segments<kBlockQ>(walk, spans, at.batch_index, at.tile);
  }
  walk.tile = walk.skip_to<kBlockKv>(walk.tile);

  extern __shared__ __align__(1024) uint8_t smem[];
  const ForwardTiles<Config> tiles{ptx::shared_address(smem)};
  const TileLoader<Config, Element> loader{params, tiles, band, row0};
  loader.set_head(batch, at.head / (shape.heads / shape.kv_heads));

  float out[kM][Config::kValueDim / 8][4];
  set_zero(out);
  OnlineSoftmax<kM, kGeneral> softmax;
  float to_log2 = params.options.scale * kLog2E;
  if constexpr (kGeneral) to_log2 = in_natural_units(params) ? kLog2E : 1.0f;

  uint32_t query_rmem[Config::kQueryInRegisters ? kM : 1][Config::kHeadDim / kStepCols<Element>][4];
  if (walk.tile < walk.end) {
    loader.load_query(batch, at.head);
    loader.load_key(walk.tile, 0);
    if constexpr (Config::kStages == 2) loader.load_value(walk.tile, 0);
    ptx::cp_async_commit_group();
    if constexpr (std::is_same_v<Element, Tf32>) wait_for_tiles<Config, Element>(tiles.query());
    if constexpr (Config::kQueryInRegisters) {
      wait_for_copies();
      read_query(query_rmem, tiles.query());
    }
  }

  for (int stage = 0; walk.tile < walk.end; stage ^= Config::kStages - 1) {
    const int32_t col0 = walk.tile * kBlockKv;
    const int32_t next = walk.skip_to<kBlockKv>(walk.tile + 1);
    // After this wait, the tile has arrived, and all warps have read the previous one.
    if constexpr (Config::kStages == 2) {
      wait_for_tiles<Config, Element>(tiles.key(stage), tiles.value(stage));
      if (next < walk.end) {
        loader.load_key(next, stage ^ 1);
        loader.load_value(next, stage ^ 1);
      }
    } else {
      wait_for_tiles<Config, Element>(tiles.key(0));
      loader.load_value(walk.tile, 0);
    }
    ptx::cp_async_commit_group();

    float logits[kM][kBlockKv / 8][4];
    multiply_query_key<Config, Element>(logits, query_rmem, tiles.query(), tiles.key(stage));
    if constexpr (Config::kStages == 1) {
      wait_for_tiles<Config, Element>(tiles.value(0));  // and all warps have read K
      if (next < walk.end) loader.load_key(next, 0);
      ptx::cp_async_commit_group();
    }

    const uint32_t attended = mask_logits<Config, Element, kGeneral>(logits, params, batch, at.head,
                                                                     band, row0, warp_row0, col0);
    softmax.update_maximum(logits, to_log2, out);
    Kept kept[kGeneral ? kM : 1];
    const bool drops = kGeneral && params.options.dropout_threshold != 0;
    if (drops) {
      find_kept<kBlockKv / 8>(kept, LogitModifiers(params, batch, at.head), warp_row0, col0);
    }
    multiply_probability_value<Config, Element>(out, logits, softmax, to_log2, drops, kept,
                                                attended, tiles.value(stage));
    walk.tile = next;
  }

  // Blocks without tiles wait, too: no copy may be in flight to the memory of Q, which out reuses.
  wait_for_copies();
  finish_rows<Element>(out, softmax, to_log2, params, batch, at.head, warp_row0, band);
  store_out<Config, Element>(params, batch, at.head, row0, tiles.out(), out);
}

template <typename Config, typename Element, bool kGeneral>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    forward_kernel(const __grid_constant__ Forward params, const SegmentSpans spans) {
  ExtremeTiles<Config> extreme;
  uint32_t index = blockIdx.x;
  do {
    if (kGeneral && params.extreme_rows_only) {
#if __CUDA_ARCH__ >= 900
      ptx::griddepcontrol_wait();  // until the previous kernel has stored lse
#endif
      if (!extreme.next(params, index)) return;
    }
    attend<Config, Element, kGeneral>(params, spans, index);
  } while (kGeneral && params.extreme_rows_only);
}

}  // namespace jax_flash::sm80
