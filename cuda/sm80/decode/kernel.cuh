// Computes the forward pass of calls with few query rows, such as decoding, with any modifiers but
// dropout. It has the mathematics of sm80/forward/kernel.cuh, with a last step that combines rows
// that several warps, and possibly several blocks, have computed for different keys
// (sm80/decode/finish_row.cuh, combine.cuh).
//
// A unit is up to 16 query rows of the heads that share a key/value head, so that keys and values
// are read once for all of them (plan/decode_sm80.h). A block computes a part of a unit's keys, a
// tile at a time: all of its threads copy the tile, and each warp computes all rows for its own
// keys of the tile. If units have one row of float32, products need no tensor cores (one_row.cuh).
//
// Shared memory: Q | kStages tiles of K | kStages tiles of V; at the end, the warps' O.
#pragma once

#include <cstdint>
#include <type_traits>

#include "modifiers/logits.cuh"
#include "modifiers/units.cuh"
#include "params.h"
#include "plan/decode_sm80.h"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/shared.cuh"
#include "sm80/decode/call.cuh"
#include "sm80/decode/finish_row.cuh"
#include "sm80/decode/float8.cuh"
#include "sm80/decode/one_row.cuh"
#include "sm80/forward/kernel.cuh"
#include "sm80/kernels.h"
#include "sm80/products.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/element.cuh"
#include "tile/float32_rows.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

template <typename Element, int kHeadDimension>
struct DecodeConfig {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr bool kOneRow = std::is_same_v<Element, Float32>;  // units have one: one_row.cuh
  static constexpr int kRows = kOneRow ? 1 : kDecodeRows;
  static constexpr int kOutN = kHeadDim / (kOneRow ? 16 : 8);  // accumulators of O
  // Stands for Element where rows are finished. Split products are as exact as those of float32.
  using FinishElement = std::conditional_t<kOneRow, Tf32x3, Element>;
  static constexpr int kWarps = decode_warps(kHeadDim), kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = decode_warp_keys(kHeadDim, kIsFloat8<Element>);
  static constexpr int kBlockKv = kWarps * kWarpKeys;
  // For multiply_probability_value(). Only one warp reads an element, so it is rounded then.
  static constexpr bool kInterleaved = false, kRoundsTiles = false;
  // Tiles of float8 have pairs of columns as elements (float8.cuh).
  using Stored = std::conditional_t<kIsFloat8<Element>, uint16_t, Element>;
  static constexpr int kPacked = sizeof(Stored) / sizeof(Element);
  using QueryTile = SmemTile<kDecodeRows, kHeadDim / kPacked, sizeof(Stored)>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim / kPacked, sizeof(Stored)>;
  using ValueTile = KeyTile;
  static constexpr int kStages = QueryTile::kBytes + 4 * KeyTile::kBytes <= 96 * 1024 ? 2 : 1;
  static constexpr int kSmemBytes = QueryTile::kBytes + 2 * kStages * KeyTile::kBytes;
  // Blocks of a multiprocessor of sm_90. Split products need more registers.
  static constexpr bool kSplit = std::is_same_v<Element, Tf32x3>;
  // Up to 48 KB, four blocks of four warps: sm80/TUNING.md, "Time before the first copies".
  static constexpr int kBlocks =
      kSplit || kSmemBytes > 72 * 1024 ? 2 : (kSmemBytes > 48 * 1024 || kWarps < 4 ? 3 : 4);
  static_assert(kSmemBytes <= 98 * 1024);
  static_assert(kWarps * kDecodeRows * kHeadDim * 4 <= kSmemBytes);
  static_assert(!kIsFloat8<Element> || kScaleBlock % kBlockKv == 0);  // one scale for a tile
};

// Stands for Float8Scales where operands have no scales.
struct NoScales {
  template <typename... Arguments>
  __device__ __forceinline__ explicit NoScales(const Arguments&...) {}
};

// Starts to copy a unit's rows of an operand that has `cols` columns. Rows that it lacks, and
// columns past the last, become zero. `cols` is a reference so that the FP8 kernels stay as they
// were timed.
template <typename Config, typename Element>
__device__ __forceinline__ void load_query_rows(const typename Config::QueryTile& tile,
                                                const Operand& operand, const int32_t& cols,
                                                const BatchIndex& batch, const DecodeUnit& unit) {
  using Tile = typename Config::QueryTile;
  constexpr int kChunks = Tile::kCols / Tile::kChunkCols, kPacked = Config::kPacked;
  for (int index = threadIdx.x; index < Config::kRows * kChunks; index += Config::kThreads) {
    const int row = index / kChunks, col = index % kChunks * Tile::kChunkCols;
    const int valid = row < unit.rows ? min(max(cols / kPacked - col, 0), Tile::kChunkCols) : 0;
    const int last = min(row, unit.rows - 1);
    const Element* from = batch.pointer<const Element>(operand, unit.head(last)) +
                          unit.query(last) * operand.row + col * kPacked;
    const uint32_t to = tile.address(row, index % kChunks);
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
      ptx::cp_async_16_of(to, from, valid * static_cast<int>(sizeof(Element)) * kPacked);
    } else {  // float32
      for (int e = 0; e < 4; ++e) ptx::cp_async_4(to + e * 4, from + e, e < valid);
    }
  }
}

// Adds up the warps' rows, which are in shared memory, and stores the results, or the block's part
// of them. Each warp takes some of the rows.
template <typename Config, typename Element>
__device__ __forceinline__ void combine_warps(
    const Forward& params, const DecodeParts& parts, const BatchIndex& batch, const Band& band,
    const DecodeUnit& unit, int64_t part, const float* values,
    const float2 (&statistics)[Config::kWarps][kDecodeRows]) {
  const float to_log2 = in_natural_units(params) ? kLog2E : 1.0f;
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < unit.rows; row += Config::kWarps) {
    CombinedRow combined;
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) combined.include_top(statistics[i][row]);
    float factors[Config::kWarps];
#pragma unroll
    for (int i = 0; i < Config::kWarps; ++i) {
      factors[i] = combined.factor(statistics[i][row], to_log2);
      combined.total += statistics[i][row].y * factors[i];
    }
    const int64_t place = part * kDecodeRows + row;
    const int32_t head = unit.head(row), query = unit.query(row);
    float normalizer = 0.0f;
    if (parts.parts.divisor == 1) {
      normalizer = finish_row<Element>(params, batch, band, head, query, combined.top,
                                       combined.total, lane == 0);
    } else if (lane == 0) {
      reinterpret_cast<float2*>(parts.statistics)[place] = {combined.top, combined.total};
    }
    for (int col = lane * 4; col < params.shape.value_dim; col += 128) {
      float4 sum = {};
#pragma unroll
      for (int i = 0; i < Config::kWarps; ++i) {
        const auto& value = *reinterpret_cast<const float4*>(
            values + (i * kDecodeRows + row) * Config::kHeadDim + col);
        add_scaled(sum, factors[i], value);
      }
      if (parts.parts.divisor == 1) {
        store_columns<Element>(params, batch, head, query, col, sum, normalizer);
      } else {
        *reinterpret_cast<float4*>(parts.values + place * parts.pitch + col) = sum;
      }
    }
  }
}

// Computes the rows of a part of a unit's keys. The key tiles are in shared memory from
// `key_smem` on; the value tiles follow.
template <typename Config, typename Element>
struct DecodeLoop {
  using KeyTile = typename Config::KeyTile;
  using Stored = typename Config::Stored;
  using TileScales = std::conditional_t<kIsFloat8<Element>, Float8Scales, NoScales>;
  const DecodeCall& call;
  const Forward& params;
  const Band& band;
  typename Config::QueryTile query_smem;
  const Stored *key, *value;   // of the head
  int32_t first_col, end_col;  // columns that some row may attend to
  int32_t rows;                // of the unit

  // Returns a tile of K for which == 0, or of V for which == 1.
  __device__ __forceinline__ KeyTile tile_smem(int stage, int which) const {
    return {query_smem.root,
            Config::QueryTile::kBytes + static_cast<uint32_t>(2 * stage + which) * KeyTile::kBytes};
  }
  __device__ __forceinline__ void load(int32_t tile, int stage) const {
    const auto load_rows = [&](int which, const Stored* rows, int64_t row_stride, int32_t cols) {
      load_tile<Config::kThreads>(tile_smem(stage, which), rows, row_stride / Config::kPacked,
                                  tile * Config::kBlockKv, first_col, end_col,
                                  cols / Config::kPacked);
    };
    load_rows(0, key, params.key.row, params.shape.head_dim);
    load_rows(1, value, params.value.row, params.shape.value_dim);
  }
  // True if the thread's second row exists.
  __device__ __forceinline__ bool has_second_row() const { return !Config::kOneRow && rows > 8; }
  // Returns the warp's own keys of a tile.
  static __device__ __forceinline__ KeyTile of_warp(KeyTile tile) {
    tile.offset += threadIdx.x / 32 * Config::kWarpKeys * 128;
    return tile;
  }

  // Sets the products of Q and the warp's keys.
  template <int kN>
  __device__ __forceinline__ void multiply_query_key(float (&products)[1][kN][4], int32_t tile,
                                                     int stage, const TileScales& scales) const {
    const KeyTile keys = of_warp(tile_smem(stage, 0));
    if constexpr (kIsFloat8<Element>) {
      multiply_float8_by_transpose(products, query_smem, keys);
      const float key_scale = scales.key_of(tile * Config::kBlockKv / kScaleBlock);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) products[0][n][e] *= scales.query[e / 2] * key_scale;
      }
    } else if constexpr (Config::kOneRow) {
      multiply_one_row(products, query_smem, keys);
    } else {
      multiply_by_transpose<Element, kRolled>(products, query_smem, 0, keys, 0);
    }
  }
  // Turns logits into P, and adds P V to `out`, whose unit is `unit` if the operands are float8.
  template <int kN, int kOutN>
  __device__ __forceinline__ void add_probability_value(
      float (&out)[1][kOutN][4], float (&logits)[1][kN][4], OnlineSoftmax<1, true>& softmax,
      float to_log2, int32_t tile, int stage, const TileScales& scales, float& unit) const {
    const uint32_t attended = attended_columns(logits);
    if (!__any_sync(0xffffffff, attended != 0)) return;
    // Running maxima have no slack: a greatest P of exactly 1 has no rounding error (but in FP8).
    softmax.update_maximum(logits, to_log2, out, 0.0f);
    const KeyTile values = of_warp(tile_smem(stage, 1));
    if constexpr (kIsFloat8<Element>) {
      const float share =
          raise_unit(scales.value_of(tile * Config::kBlockKv / kScaleBlock), unit, out);
      const float lift = lift_of(share);
      if (lift != 1.0f) multiply_out(out, lift);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        softmax.exponentials(logits[0][n], 0, to_log2);
#pragma unroll
        for (int e = 0; e < 4; ++e) logits[0][n][e] *= share * lift;
      }
      add_float8_product(out, logits, values, attended);
      if (lift != 1.0f) multiply_out(out, 1.0f / lift);
    } else if constexpr (Config::kOneRow) {
#pragma unroll
      for (int n = 0; n < kN; ++n) softmax.exponentials(logits[0][n], 0, to_log2);
      add_one_row(out, logits, values, attended);
    } else {
      const Kept kept[1] = {};
      multiply_probability_value<Config, Element, true>(out, logits, softmax, to_log2, false, kept,
                                                        attended, values);
    }
  }

  // Computes tiles [tile, end). The first has been loaded. `modifiers`, `queries`: of this thread's
  // two rows. Returns the unit of `out`.
  template <int kOutN>
  __device__ __forceinline__ float run(int32_t tile, int32_t end, float (&out)[1][kOutN][4],
                                       OnlineSoftmax<1, true>& softmax, float to_log2,
                                       const LogitModifiers (&modifiers)[2],
                                       const int32_t (&queries)[2],
                                       const TileScales& scales) const {
    float unit = kIsFloat8<Element> ? 0.0f : 1.0f;
#pragma unroll 1
    for (int stage = 0; tile < end; ++tile, stage ^= Config::kStages - 1) {
      const int32_t col0 =
          tile * Config::kBlockKv + static_cast<int>(threadIdx.x) / 32 * Config::kWarpKeys;
      RowElements<Config::kWarpKeys / 8> elements[2];
      if (call.loads) {  // while copies are in flight
        modifiers[0].load_row(elements[0], queries[0], col0);
        if (has_second_row()) modifiers[1].load_row(elements[1], queries[1], col0);
      }
      wait_for_copies();
      if (Config::kStages == 2 && tile + 1 < end) load(tile + 1, stage ^ 1);
      ptx::cp_async_commit_group();
      float logits[1][Config::kWarpKeys / 8][4];
      multiply_query_key(logits, tile, stage, scales);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 0 || has_second_row()) {
          if (call.modified) {
            modifiers[half].apply_row(logits[0], half, band, queries[half], col0, elements[half]);
          } else {
            LogitModifiers::apply_band(logits[0], half, band, queries[half], col0,
                                       params.options.scale);
          }
          continue;
        }
#pragma unroll
        for (int n = 0; n < Config::kWarpKeys / 8; ++n) {
          logits[0][n][2] = logits[0][n][3] = minus_infinity();
        }
      }
      add_probability_value(out, logits, softmax, to_log2, tile, stage, scales, unit);
      if (Config::kStages == 1) {
        __syncthreads();
        if (tile + 1 < end) load(tile + 1, 0);
        ptx::cp_async_commit_group();
      }
    }
    wait_for_copies();
    return unit;
  }
};

// Stores a warp's rows, multiplied by `unit`, and their statistics for combine_warps().
template <typename Config, typename Element, int kOutN>
__device__ __forceinline__ void put_rows(float* values,
                                         float2 (&statistics)[Config::kWarps][kDecodeRows],
                                         const float (&out)[1][kOutN][4],
                                         const OnlineSoftmax<1, true>& softmax, float unit) {
  const int warp = threadIdx.x / 32;
  float* mine = values + warp * kDecodeRows * Config::kHeadDim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = fragment_row(0, 2 * half);
    float total = softmax.sum[0][half];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    if (threadIdx.x % 4 == 0) statistics[warp][row] = {softmax.maximum[0][half], total};
    if constexpr (kIsFloat32<Element>) {
      Float32Rows(mine, Config::kHeadDim, Config::kHeadDim).store(row, half, out[0]);
    } else if constexpr (kIsFloat8<Element>) {
#pragma unroll
      for (int n = 0; n < kOutN; n += 2) {  // even and odd columns of 16
        const float (&even)[4] = out[0][n], (&odd)[4] = out[0][n + 1];
        *reinterpret_cast<float4*>(mine + row * Config::kHeadDim + n * 8 + threadIdx.x % 4 * 4) = {
            even[2 * half] * unit, odd[2 * half] * unit, even[2 * half + 1] * unit,
            odd[2 * half + 1] * unit};
      }
    } else {
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
        *reinterpret_cast<float2*>(mine + row * Config::kHeadDim + fragment_col(n, 0)) = {
            out[0][n][2 * half], out[0][n][2 * half + 1]};
      }
    }
  }
}

// The grid is [parts, units].
template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocks)
    decode_kernel(const __grid_constant__ DecodeCall call,
                  const __grid_constant__ DecodeParams<Element> params) {
  extern __shared__ __align__(1024) uint8_t smem[];
  __shared__ float2 statistics[Config::kWarps][kDecodeRows];
  const DecodeParts& parts = call.parts;
  const auto part = parts.units.quotient(static_cast<int32_t>(blockIdx.x));
  const auto unit_index = static_cast<int32_t>(blockIdx.x) - part * parts.units.divisor;
  const DecodeUnit unit(params.shape, parts, unit_index);
  const BatchIndex batch(call.batch_axes, unit.batch);
  const Band band = call.band_of(params, unit.batch, batch);
  const int32_t last_query = min(unit.query(unit.rows - 1), band.q_len - 1);
  const Range tiles = kv_tiles<Config::kBlockKv>(band, unit.query(0), last_query + 1);
  // The part's tiles: the first `rest` parts have one more.
  const int32_t count = tiles.end - tiles.first, share = parts.parts.quotient(count);
  const int32_t rest = count - share * parts.parts.divisor;
  const int32_t first = tiles.first + part * share + min(part, rest);
  const int32_t end = first + share + (part < rest);

  using Loop = DecodeLoop<Config, Element>;
  const auto of_head = [&](const Operand& operand) {
    return reinterpret_cast<const typename Loop::Stored*>(
        batch.pointer<const Element>(operand, unit.kv_head));
  };
  const Loop loop{call,
                  params,
                  band,
                  {ptx::shared_address(smem), 0},
                  of_head(params.key),
                  of_head(params.value),
                  band.first_col(unit.query(0)),
                  band.end_col(last_query),
                  unit.rows};
  if (first < end) {
    loop.load(first, 0);
    load_query_rows<Config, Element>(loop.query_smem, params.query, params.shape.head_dim, batch,
                                     unit);
  }
  ptx::cp_async_commit_group();
#if __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
#endif

  int32_t heads[2], queries[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = Config::kOneRow ? 0 : fragment_row(0, 2 * half);
    heads[half] = unit.head(min(row, unit.rows - 1));
    queries[half] = row < unit.rows ? unit.query(row) : band.q_len;  // past the end: no keys
  }
  const LogitModifiers modifiers[2] = {
      LogitModifiers(params, batch, heads[0], call.modified),
      LogitModifiers(params, batch, heads[1], call.modified && loop.has_second_row())};
  float out[1][Config::kOutN][4];
  set_zero(out);
  OnlineSoftmax<1, true> softmax;
  const float to_log2 = in_natural_units(params) ? kLog2E : 1.0f;
  const typename Loop::TileScales scales(params, batch, unit.kv_head, heads, queries);
  const float out_unit = loop.run(first, end, out, softmax, to_log2, modifiers, queries, scales);

  auto* values = reinterpret_cast<float*>(smem);
  if constexpr (Config::kOneRow) {
    const int warp = threadIdx.x / 32;
    put_one_row(values + warp * kDecodeRows * Config::kHeadDim, statistics[warp][0], out, softmax);
  } else {
    put_rows<Config, Element>(values, statistics, out, softmax, out_unit);
  }
  __syncthreads();
  combine_warps<Config, typename Config::FinishElement>(
      params, parts, batch, band, unit, int64_t{unit_index} * parts.parts.divisor + part, values,
      statistics);
}

// Launches decoding. kHeadDim bounds head_dim and value_dim.
template <typename Element, int kHeadDim>
Status launch_decode(const DecodeParams<Element>& params, cudaStream_t stream) {
  using Config = DecodeConfig<Element, kHeadDim>;
  const Shape& shape = params.shape;
  int sms = 0;
  if (const Status status = multiprocessors(sms); !status.ok()) return status;
  const DecodeParts parts =
      DecodeParts::at(shape, params.query.dtype, int64_t{sms} * Config::kBlocks, params.workspace);
  const DecodeCall call(params, parts);
  const Status status =
      launch_kernel("sm80::decode_kernel", shape, decode_kernel<Config, Element>, parts.blocks(),
                    Config::kThreads, Config::kSmemBytes, stream, call, params);
  if (!status.ok() || parts.parts.divisor == 1) return status;
  return launch_decode_combine<typename Config::FinishElement>(call, params, stream);
}

}  // namespace jax_flash::sm80
