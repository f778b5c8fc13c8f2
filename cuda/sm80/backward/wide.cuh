// Computes the backward pass for head dims above 256, with every modifier: dK and dV by one kernel,
// dQ by another.
//
//   for each streamed tile, of 32 queries (for dK and dV) or 32 keys (for dQ)
//     S = Q K^T                                        warps 0 to 3
//     dP = dO V^T                                      warps 4 to 7, which pass it to warps 0 to 3
//     P = 2^(log2(e) (S - lse)),  dS = P (dP - delta)  warps 0 to 3; to shared memory
//     dV += P^T dO,  dK += dS^T Q                      all warps, 64 columns each, or
//     dQ += dS K                                       all warps, 64 columns each
//
// dK and dV of 32 keys take half of the registers of a multiprocessor, and leave none for dQ. To
// add dQ in device memory would take more bytes than L2 can add. So both kernels compute S and dP.
// As no kernel adds in device memory, every run gives the same bits.
//
// With two stages, the next tile is copied during the whole current one. With one stage, each copy
// starts when the last product with the previous contents ends. The shared-memory map is in
// WideBackwardConfig.
#pragma once

#include <cstdint>

#include "modifiers/score_gradient.cuh"
#include "modifiers/scores.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "ptx/warpgroup.cuh"
#include "sm80/backward/kernel.cuh"
#include "sm80/forward/kernel.cuh"
#include "sm80/products.cuh"
#include "sm80/wide_config.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/quad.cuh"

namespace jax_flash::sm80 {

// Returns the places of a block's tiles in shared memory.
template <typename Config>
struct WideBackwardTiles {
  using Tile = typename Config::Tile;
  uint32_t base;

  __device__ __forceinline__ Tile key(uint32_t stage = 0) const {
    return {base, stage * Tile::kBytes};
  }
  __device__ __forceinline__ Tile value(uint32_t stage = 0) const {
    return {base, Config::kValueOffset + stage * Tile::kBytes};
  }
  __device__ __forceinline__ Tile query(uint32_t stage = 0) const {
    return {base, Config::kQueryOffset + stage * Tile::kBytes};
  }
  __device__ __forceinline__ Tile dout(uint32_t stage = 0) const {
    return {base, Config::kOutOffset + stage * Tile::kBytes};
  }
  __device__ __forceinline__ typename Config::ScoreTile probability() const {
    return {base, Config::kProbabilityOffset};
  }
  __device__ __forceinline__ typename Config::ScoreTile dscore() const {
    return {base, Config::kScoreOffset};
  }
};

// Says which part of S or dP this thread's warp computes. Warps 0 to 3 compute S, and warps 4 to 7
// dP. Two warps compute the same 32 rows by 16 columns: each sums over half of the head dim. Then
// the two warps of S add up their sums, for 16 rows each, and those of dP likewise.
struct WideScorePart {
  static constexpr int kBlockBytes = 1024;  // of 16x16 float32

  int warp = threadIdx.x / 32;
  bool is_dprobability = warp >= 4;
  // `side`: the warp's 16 columns. `half`: its half of the head dim, and its 16 rows afterwards.
  int side = warp % 2, half = warp / 2 % 2;
  int row = half * 16, col = side * 16;

  // The barrier of the four warps with the same columns: warps of S wait until all four have put
  // their sums in shared memory; warps of dP only arrive.
  __device__ __forceinline__ void wait() const { ptx::barrier_sync(1 + side, 128); }
  __device__ __forceinline__ void arrive() const { ptx::barrier_arrive(1 + side, 128); }

  // Returns the address of this thread's fragment in slot `number` for its columns and 16 rows,
  // number `rows`. Slot 0 is for S, and slots 1 and 2 are for the two halves of dP.
  static constexpr int kSlots = 3;
  __device__ __forceinline__ uint32_t slot(uint32_t base, int rows, int number) const {
    return base + ((side * 2 + rows) * kSlots + number) * kBlockBytes + threadIdx.x % 32 * 16;
  }
};

// Computes S and dP of a tile. Returns true in warps 0 to 3, which get S and dP of their 16 rows by
// 16 columns.
template <typename Element, typename Config>
__device__ __forceinline__ bool multiply_scores(float (&scores)[1][2][4], float (&dscores)[1][2][4],
                                                const WideBackwardTiles<Config>& tiles,
                                                uint32_t key_stage, uint32_t query_stage,
                                                const Shape& shape, const WideScorePart& part) {
  const bool second = part.is_dprobability;
  const uint32_t slots = tiles.base + Config::kHandoverOffset;
  float sums[2][2][4];
  multiply_first_columns<Element, 2>(
      sums, second ? tiles.dout(query_stage) : tiles.query(query_stage), 0,
      second ? tiles.value(key_stage) : tiles.key(key_stage), part.col,
      second ? shape.value_dim : shape.head_dim, part.half);
  if (second) {
#pragma unroll
    for (int m = 0; m < 2; ++m) put_fragments(part.slot(slots, m, 1 + part.half), sums[m]);
    part.arrive();
    return false;
  }
  float others[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[0][n][e] = part.half ? sums[1][n][e] : sums[0][n][e];
      others[n][e] = part.half ? sums[0][n][e] : sums[1][n][e];
    }
  }
  put_fragments(part.slot(slots, 1 - part.half, 0), others);
  part.wait();
  set_zero(dscores);
  add_fragments(part.slot(slots, part.half, 0), scores[0]);
  add_fragments(part.slot(slots, part.half, 1), dscores[0]);
  add_fragments(part.slot(slots, part.half, 2), dscores[0]);
  return true;
}

// Turns dP into dS = P (dP - delta) times the soft cap's slope, and P into the operand of dV, with
// dropout applied to both, for a call with modifiers. ScoreGradient::finish() does the same, but
// its kernels have registers for P alone, so it derives the slopes from P and lse.
__device__ __forceinline__ void finish_modified(float (&p)[2][4], float (&dp)[2][4],
                                                const float (&slopes)[2][4],
                                                const float (&delta)[2], const Forward& params,
                                                const BatchIndex& batch, int32_t head, int32_t row0,
                                                int32_t col0) {
  const Options& options = params.options;
  float dropped[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) dropped[n][e] = 1.0f;
  }
  if (options.dropout_threshold != 0) {
    const Kept kept =
        Dropout(params, batch, head).kept<2, false>(options.dropout_threshold, row0, col0);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        dropped[n][e] = kept.at<false>(n, e) ? options.dropout_scale : 0.0f;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float ds = p[n][e] * (dp[n][e] * dropped[n][e] - delta[e / 2]) * slopes[n][e];
      dp[n][e] = p[n][e] == 0.0f ? 0.0f : ds;
      p[n][e] *= dropped[n][e];
    }
  }
}

// Computes the slopes of the soft cap, 1 - (logit / cap)^2, from logits. Without a cap they are 1.
__device__ __forceinline__ void find_slopes(float (&slopes)[2][4], const float (&logits)[2][4],
                                            const Forward& params) {
  const float cap = params.options.logits_soft_cap;
  const float unit = in_natural_units(params) ? 1.0f : kLn2;
  const float inverse = cap > 0.0f ? __fdividef(unit, cap) : 0.0f;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float ratio = logits[n][e] * inverse;
      slopes[n][e] = 1.0f - ratio * ratio;
    }
  }
}

// Computes P and dS of the tile at (row0, col0), and stores them. If the call has modifiers,
// `modified` is true, and `note_keys(scores, col)` may first change the products of a warp, whose
// first column is `col`.
template <typename Element, typename Config, typename NoteKeys>
__device__ __forceinline__ void differentiate_tile(
    const WideBackwardTiles<Config>& tiles, uint32_t key_stage, uint32_t query_stage,
    const float* lse_smem, const float* delta_smem, const Backward& params, const BatchIndex& batch,
    int32_t head, const Band& band, int32_t row0, int32_t col0, bool modified, NoteKeys note_keys) {
  const WideScorePart part;
  float scores[1][2][4], dscores[1][2][4];
  if (!multiply_scores<Element>(scores, dscores, tiles, key_stage, query_stage, params.shape,
                                part)) {
    return;
  }
  row0 += part.row;
  col0 += part.col;
  float lse[1][2], delta[1][2];
  load_rows(lse, lse_smem + part.row);
  load_rows(delta, delta_smem + part.row);
  if (modified) {
    note_keys(scores, part.col);
    modify_tile<kEveryModifier, true>(scores, params, batch, head, band, row0, col0);
    float slopes[2][4];
    find_slopes(slopes, scores[0], params);
    ScoreGradient<true, 1, 2, Element>(params, batch, head, row0, col0)
        .probabilities(scores[0], lse[0], 1.0f, 0, 0, 2);
    finish_modified(scores[0], dscores[0], slopes, delta[0], params, batch, head, row0, col0);
  } else {
    scale_tile(scores, params, band, row0, col0);
    const ScoreGradient<false, 1, 2, Element> gradient(params, batch, head, row0, col0);
    gradient.probabilities(scores[0], lse[0], 1.0f, 0, 0, 2);
    gradient.finish(scores, dscores, lse, delta);
  }
  store_fragments<Element>(tiles.probability(), part.row, part.col / 8, scores);
  store_fragments<Element>(tiles.dscore(), part.row, part.col / 8, dscores);
}

// Stores a warp's columns, from `col` on, of a gradient. `gmem` points to the first row.
template <typename Element, int kM, int kN>
__device__ __forceinline__ void store_gradient(Element* gmem, int64_t row_stride, int32_t rows,
                                               int32_t cols, int32_t col, float scale,
                                               const float (&values)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    store_rows(gmem + m * 16 * row_stride + col, row_stride, rows - m * 16, cols - col, scale,
               values[m]);
  }
}

// Computes dK and dV. The grid is batch x key/value head x key tiles.
template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_key_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                    bool modified) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv, kN = Config::kGradientN;
  const Shape& shape = params.shape;
  const int32_t group = shape.heads / shape.kv_heads;
  extern __shared__ __align__(1024) uint8_t smem[];
  const WideBackwardTiles<Config> tiles{ptx::shared_address(smem)};
  const KeyTilePlace<kBlockKv> at(params, blockIdx.x, false);
  const BatchIndex batch(shape, at.batch_index);
  const int32_t col0 = at.tile * kBlockKv;
  const Band band(params, batch);
  const QueryLoader<Config, Element, WideBackwardTiles<Config>> loader{
      params, workspace, tiles, band, int64_t{at.batch_kv_head} * group};
  loader.set_head(batch, at.kv_head * group);
  QueryTileWalk walk{q_tiles<kBlockQ>(band, col0, col0 + kBlockKv), group};
  if (workspace.spans.query) {
    skip_other_segments<kBlockKv>(walk, workspace.spans, at.batch_index, at.tile);
  }
  walk.start<kBlockQ>();
  __shared__ uint32_t bad_keys_smem[kBlockKv / 32 + 1];
  if (!walk.done()) {
    load_keys<Config, Element>(tiles, params, batch, band, at.kv_head, col0);
    loader.load_both(walk, 0);
    ptx::cp_async_commit_group();
    if (modified) prepare_keys<Config, Element, true>(tiles, bad_keys_smem);
  }

  const int warp = threadIdx.x / 32;
  float dkey[kBlockKv / 16][kN][4], dvalue[kBlockKv / 16][kN][4];
  set_zero(dkey);
  set_zero(dvalue);
  for (int stage = 0; !walk.done(); stage ^= Config::kStages - 1) {
    QueryTileWalk next = walk;
    next.advance<kBlockQ>();
    // Q and dO have arrived, and all warps have read the previous ones, P and dS.
    wait_for_copies<0>();
    if constexpr (Config::kStages == 2) {
      if (!next.done()) loader.load_both(next, stage ^ 1);
      ptx::cp_async_commit_group();
    }
    differentiate_tile<Element>(
        tiles, 0, stage, loader.lse(stage), loader.delta(stage), params, batch,
        at.kv_head * group + walk.head, band, walk.tile * kBlockQ, col0, modified,
        [&](auto& scores, int col) { mark_bad_keys<kBlockKv>(scores, bad_keys_smem, col); });
    __syncthreads();
    // A warp's columns are contiguous: kWarpCols == 1, and the start is its first block of 16.
    add_transpose_product<Element, 1>(dvalue, tiles.probability(), 0, tiles.dout(stage),
                                      warp * kN / 2);
    if constexpr (Config::kStages == 1) loader.replace_dout(next);
    add_transpose_product<Element, 1>(dkey, tiles.dscore(), 0, tiles.query(stage), warp * kN / 2);
    if constexpr (Config::kStages == 1) loader.replace_query(next);
    walk = next;
  }

  const int32_t rows = shape.kv_len - col0, col = warp * kN * kChunk;
  store_gradient(batch.pointer<Element>(params.dkey, at.kv_head) + col0 * params.dkey.row,
                 params.dkey.row, rows, shape.head_dim, col, params.options.scale, dkey);
  store_gradient(batch.pointer<Element>(params.dvalue, at.kv_head) + col0 * params.dvalue.row,
                 params.dvalue.row, rows, shape.value_dim, col, 1.0f, dvalue);
}

// Finds keys that are NaN or infinite among the 16 keys from `key0` of the tile on. `scores` are
// their products with Q; those of such keys are set to NaN. `bad` gets a bit for each such key: see
// clear_bad_keys(). Only a product that is not finite makes the warp read the keys: the cause may
// be a key or a query.
template <typename Element, typename Tile>
__device__ __forceinline__ void note_bad_keys(float (&scores)[1][2][4], const Tile& tile, int key0,
                                              uint32_t* bad) {
  bool finite = true;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) finite = finite && fabsf(scores[0][n][e]) < -minus_infinity();
  }
  if (__all_sync(0xffffffff, finite)) return;
  const int lane = threadIdx.x % 32, key = lane % 16;
  bool found = false;
  for (int chunk = lane / 16; chunk < Tile::kCols / kChunk; chunk += 2) {
    const uint4 words = ptx::ld_shared_v4(tile.address(key0 + key, chunk));
    for (const uint32_t pair : {words.x, words.y, words.z, words.w}) {
      found |= has_bad_element<Element>(pair);
    }
  }
  const uint32_t votes = __ballot_sync(0xffffffff, found), keys = (votes | votes >> 16) & 0xffff;
  if (lane == 0) atomicOr(bad, keys << key0);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (keys >> fragment_col(n, e) & 1) scores[0][n][e] = __int_as_float(0x7fffffff);
    }
  }
}

// Returns the bits of keys that are finite, in the order of add_kept_product().
__device__ __forceinline__ uint32_t kept_keys(uint32_t bad) {
  uint32_t kept = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) kept |= (~bad >> fragment_col(n, 0) & 3) << (2 * n);
  return kept;
}

// Computes dQ. The grid is batch x head x query tiles.
template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_query_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace,
                      bool modified) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv, kN = Config::kGradientN;
  const Shape& shape = params.shape;
  const QueryTilePlace<kBlockQ> at(params, blockIdx.x, Config::kLongestFirst);
  const BatchIndex batch(shape, at.batch_index);
  const int32_t row0 = at.tile * kBlockQ;
  const Band band(params, batch);
  const Range range = kv_tiles<kBlockKv>(band, row0, row0 + kBlockQ);
  KeyTileWalk walk = {range.first, range.end};
  if (workspace.spans.query) {
    skip_other_segments<kBlockQ>(walk, workspace.spans, at.batch_index, at.tile);
  }
  walk.tile = walk.skip_to<kBlockKv>(walk.tile);

  extern __shared__ __align__(1024) uint8_t smem[];
  const WideBackwardTiles<Config> tiles{ptx::shared_address(smem)};
  const TileLoader<Config, Element, WideBackwardTiles<Config>> loader{params, tiles, band, row0};
  loader.set_head(batch, at.head / (shape.heads / shape.kv_heads));
  __shared__ __align__(16) float lse_smem[kBlockQ], delta_smem[kBlockQ];
  __shared__ uint32_t bad_keys_smem[2];  // for this tile and the next
  if (threadIdx.x < 2) bad_keys_smem[threadIdx.x] = 0;
  if (walk.tile < walk.end) {
    loader.load_query(batch, at.head);
    load_tile<Config::kThreads>(tiles.dout(), batch.pointer<const Element>(params.dout, at.head),
                                params.dout.row, row0, row0, min(row0 + kBlockQ, band.q_len),
                                shape.value_dim);
    const int64_t batch_head = at.batch_index * shape.heads + at.head;
    load_statistics<kBlockQ>(lse_smem, workspace.lse_log2, workspace, batch_head, row0);
    load_statistics<kBlockQ>(delta_smem, workspace.delta, workspace, batch_head, row0);
    loader.load_key(walk.tile, 0);
    loader.load_value(walk.tile, 0);
    ptx::cp_async_commit_group();
  }

  const int warp = threadIdx.x / 32;
  float dquery[kBlockQ / 16][kN][4];
  set_zero(dquery);
  for (int turn = 0; walk.tile < walk.end; turn ^= 1) {
    const int stage = turn % Config::kStages;
    const int32_t next = walk.skip_to<kBlockKv>(walk.tile + 1);
    wait_for_copies();  // K and V have arrived, and all warps have read the previous ones and dS
    if (Config::kStages == 2 && next < walk.end) {
      loader.load_key(next, stage ^ 1);
      loader.load_value(next, stage ^ 1);
    }
    ptx::cp_async_commit_group();
    if (threadIdx.x == 0) bad_keys_smem[turn ^ 1] = 0;
    differentiate_tile<Element>(tiles, stage, 0, lse_smem, delta_smem, params, batch, at.head, band,
                                row0, walk.tile * kBlockKv, modified, [&](auto& scores, int col) {
                                  note_bad_keys<Element>(scores, tiles.key(stage), col,
                                                         bad_keys_smem + turn);
                                });
    __syncthreads();
    if (Config::kStages == 1 && next < walk.end) loader.load_value(next, 0);
    ptx::cp_async_commit_group();
    add_kept_product<Element>(dquery, BlockReader(tiles.dscore(), BlockOrder::kRowsFirst, 0, 0),
                              BlockReader(tiles.key(stage), BlockOrder::kRowsFirst, 0, warp * kN),
                              kept_keys(bad_keys_smem[turn]));
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // all warps have read K
      if (next < walk.end) loader.load_key(next, 0);
      ptx::cp_async_commit_group();
    }
    walk.tile = next;
  }
  store_gradient(batch.pointer<Element>(params.dquery, at.head) + row0 * params.dquery.row,
                 params.dquery.row, shape.q_len - row0, shape.head_dim, warp * kN * kChunk,
                 params.options.scale, dquery);
}

}  // namespace jax_flash::sm80
