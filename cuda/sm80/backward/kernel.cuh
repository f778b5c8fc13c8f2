// Computes the backward pass with warp-level matrix instructions (mma.sync), after FlashAttention-2
// (arXiv:2307.08691).
//
//   for each query head of the group, for each tile of rows that may attend to the block's keys
//     S = Q K^T,  dP = dO V^T
//     P = 2^(scale log2(e) S - lse),  dS = P (dP - delta)     lse in log2 units
//     dV += P^T dO,  dK += dS^T Q     in accumulators until the end
//     dQ += dS K                      added to float32 sums in global memory
//
// A thread block owns a key tile for all query heads of the group, so dK and dV need no
// atomics. All of its warps do the same work, but divide the tiles of the three kinds of products
// in different ways (BackwardConfig). P and dS therefore pass through shared memory. Several blocks
// add to each dQ. In deterministic calls they add in turns, in the order of their keys. Blocks then
// take their keys by ticket: a block only waits for blocks that have started before it, so they
// cannot deadlock.
//
// All threads start copies of Q and dO with cp.async. With two stages, those of the next tile are
// copied during the current one; with one stage, Q is copied from the end of the dK product on, and
// dO from the end of the dV product on.
//
// Shared memory: K, later dK | V, later dV | P | dS | kStages tiles of Q | kStages tiles of dO.
// Static shared memory holds lse and delta of each stage's rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "modifiers/added_bias_gradient.cuh"
#include "modifiers/logits.cuh"
#include "modifiers/score_gradient.cuh"
#include "modifiers/segments.cuh"
#include "params.h"
#include "plan/backward_workspace.h"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "sm80/backward/edges.cuh"
#include "sm80/backward/parts.cuh"
#include "sm80/config.cuh"
#include "sm80/products.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/block_place.cuh"
#include "tile/element.cuh"
#include "tile/float32_rows.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

// Returns the places of a block's tiles in shared memory.
template <typename Config>
struct BackwardTiles {
  uint32_t base;

  __device__ __forceinline__ typename Config::KeyTile key() const { return {base, 0}; }
  __device__ __forceinline__ typename Config::ValueTile value() const {
    return {base, Config::kValueOffset};
  }
  __device__ __forceinline__ typename Config::ScoreTile probability() const {
    return {base, Config::kProbabilityOffset};
  }
  __device__ __forceinline__ typename Config::ScoreTile dscore() const {
    return {base, Config::kScoreOffset};
  }
  __device__ __forceinline__ typename Config::QueryTile query(uint32_t stage) const {
    return {base, Config::kQueryOffset + stage * Config::QueryTile::kBytes};
  }
  __device__ __forceinline__ typename Config::OutTile dout(uint32_t stage) const {
    return {base, Config::kOutOffset + stage * Config::OutTile::kBytes};
  }
};

// Says which part of each kind of product this thread's warp computes, by the first row and the
// first column. For gradients, whose columns the warps take 16 at a time in turn, the column is the
// warp's number among those that divide the columns.
template <typename Config>
struct WarpParts {
  static constexpr int kScoreCols = Config::kWarps / Config::kScoreWarpRows;
  static constexpr int kKeyCols = Config::kWarps / Config::kKeyWarpRows;
  static constexpr int kQueryCols = Config::kWarps / Config::kQueryWarpRows;
  static constexpr int kScoreM = Config::kBlockQ / 16 / Config::kScoreWarpRows;
  static constexpr int kScoreN = Config::kBlockKv / 8 / kScoreCols;
  static constexpr int kKeyM = Config::kBlockKv / 16 / Config::kKeyWarpRows;
  static constexpr int kDkeyN = Config::kHeadDim / 8 / kKeyCols;
  static constexpr int kDvalueN = Config::kValueDim / 8 / kKeyCols;
  static constexpr int kDqueryM = Config::kBlockQ / 16 / Config::kQueryWarpRows;
  static constexpr int kDqueryN = Config::kHeadDim / 8 / kQueryCols;

  int warp = threadIdx.x / 32;
  int score_row = warp / kScoreCols * kScoreM * 16, score_col = warp % kScoreCols * kScoreN * 8;
  int key_row = warp / kKeyCols * kKeyM * 16, key_col = warp % kKeyCols;
  int dquery_row = warp / kQueryCols * kDqueryM * 16, dquery_col = warp % kQueryCols;
};

// Returns the number of this block: its ticket, if there are tickets, and otherwise blockIdx.x.
__device__ __forceinline__ uint32_t take_ticket(int32_t* ticket) {
  __shared__ uint32_t ticket_smem;
  uint32_t block = blockIdx.x;
  if (ticket) {
    if (threadIdx.x == 0) ticket_smem = static_cast<uint32_t>(atomicAdd(ticket, 1));
    __syncthreads();
    block = ticket_smem;
  }
  return block;
}

// Copies tiles of Q and dO with the lse and delta of their rows, for the query heads of a group.
template <typename Config, typename Element, typename Tiles = BackwardTiles<Config>>
struct QueryLoader {
  static constexpr int kBlockQ = Config::kBlockQ;

  const Backward& params;
  const BackwardWorkspace& workspace;
  const Tiles& tiles;
  const Band& band;
  int64_t first_batch_head;

  // Called by all threads of the block, before anything is loaded.
  __device__ __forceinline__ void set_head(const BatchIndex& batch, int32_t head) const {
    if (threadIdx.x == 0) {
      query_gmem() = batch.pointer<const Element>(params.query, head);
      dout_gmem() = batch.pointer<const Element>(params.dout, head);
      if constexpr (kIsFloat32<Element>) {
        dquery_gmem() = batch.pointer<float>(params.dquery, head);
      } else {
        dquery_gmem() =
            workspace.dquery + first_batch_head * workspace.dquery_rows * params.shape.head_dim;
      }
    }
    __syncthreads();
  }
  // Start copying a tile.
  __device__ __forceinline__ void load_query(const QueryTileWalk& at, int stage) const {
    const int32_t row0 = at.tile * kBlockQ;
    load_tile<Config::kThreads>(tiles.query(stage), query_gmem() + at.head * params.query.head,
                                params.query.row, row0, row0, band.q_len, params.shape.head_dim);
    load_rows_of(at, lse(stage), workspace.lse_log2);
  }
  __device__ __forceinline__ void load_dout(const QueryTileWalk& at, int stage) const {
    const int32_t row0 = at.tile * kBlockQ;
    load_tile<Config::kThreads>(tiles.dout(stage), dout_gmem() + at.head * params.dout.head,
                                params.dout.row, row0, row0, band.q_len, params.shape.value_dim);
    load_rows_of(at, delta(stage), workspace.delta);
  }

  __device__ __forceinline__ void load_both(const QueryTileWalk& at, int stage) const {
    load_query(at, stage);
    load_dout(at, stage);
  }
  // With one stage: after all warps have read Q or dO, start copying the next tile, if any.
  __device__ __forceinline__ void replace_query(const QueryTileWalk& next) const {
    __syncthreads();
    if (!next.done()) load_query(next, 0);
    ptx::cp_async_commit_group();
  }
  __device__ __forceinline__ void replace_dout(const QueryTileWalk& next) const {
    __syncthreads();
    if (!next.done()) load_dout(next, 0);
    ptx::cp_async_commit_group();
  }

  // Return the places of a tile's lse and delta in shared memory.
  static __device__ __forceinline__ float* lse(int stage) {
    __shared__ __align__(16) float smem[Config::kStages][kBlockQ];
    return smem[stage];
  }
  static __device__ __forceinline__ float* delta(int stage) {
    __shared__ __align__(16) float smem[Config::kStages][kBlockQ];
    return smem[stage];
  }
  // This and the two pointers below are used once per tile. They are in shared memory, because
  // registers are scarce.
  static __device__ __forceinline__ float*& dquery_gmem() {
    __shared__ float* pointer;
    return pointer;
  }

 private:
  static __device__ __forceinline__ const Element*& query_gmem() {
    __shared__ const Element* pointer;
    return pointer;
  }
  static __device__ __forceinline__ const Element*& dout_gmem() {
    __shared__ const Element* pointer;
    return pointer;
  }
  __device__ __forceinline__ void load_rows_of(const QueryTileWalk& at, float* smem,
                                               const float* statistics) const {
    load_statistics<kBlockQ>(smem, statistics, workspace, first_batch_head + at.head,
                             at.tile * kBlockQ);
  }
};

// Lets a walk skip query tiles that have no segment in common with the key tile.
template <int kBlockKv>
__device__ __forceinline__ void skip_other_segments(QueryTileWalk& walk, const SegmentSpans& spans,
                                                    int64_t batch_index, int32_t kv_tile) {
  walk.query_blocks = spans.query_blocks;
  walk.query_spans = spans.query + batch_index * spans.query_blocks;
  walk.key_span =
      tile_span<kBlockKv>(spans.key + batch_index * spans.key_blocks, spans.key_blocks, kv_tile);
}

// Waits until copies to shared memory of all threads of the block have arrived, except those of the
// last kPending groups.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  ptx::cp_async_wait_group<kPending>();
  __syncthreads();
}

// Starts copying a block's keys and values. Those that no row may attend to become zeros: see
// load_tile().
template <typename Config, typename Element, typename Tiles>
__device__ __forceinline__ void load_keys(const Tiles& tiles, const Backward& params,
                                          const BatchIndex& batch, const Band& band,
                                          int32_t kv_head, int32_t col0) {
  const int32_t first = max(0, band.lo), end = min(band.kv_len, band.q_len - 1 + band.hi);
  load_tile<Config::kThreads>(tiles.key(), batch.pointer<const Element>(params.key, kv_head),
                              params.key.row, col0, first, end, params.shape.head_dim);
  load_tile<Config::kThreads>(tiles.value(), batch.pointer<const Element>(params.value, kv_head),
                              params.value.row, col0, first, end, params.shape.value_dim);
}

// Clears keys that are not finite (see clear_bad_keys()), and rounds keys and values for TF32
// products.
template <typename Config, typename Element, bool kGeneral, typename Tiles>
__device__ __forceinline__ void prepare_keys(const Tiles& tiles, uint32_t* bad_keys_smem) {
  if constexpr (kGeneral) {
    wait_for_copies<0>();
    clear_bad_keys<Config::kThreads, Element>(tiles.key(), bad_keys_smem);
  }
  if constexpr (std::is_same_v<Element, Tf32>) {  // P and dS are rounded when they are stored
    ptx::cp_async_wait_group<0>();
    round_own_chunks<Config::kThreads>(tiles.key());
    round_own_chunks<Config::kThreads>(tiles.value());
  }
}

// Turns products into logits. Pairs that are not allowed get -inf.
template <typename Config, typename Element, bool kGeneral, int kM, int kN>
__device__ __forceinline__ void mask_scores(
    float (&scores)[kM][kN][4], const ScoreGradient<kGeneral, kM, kN, Element>& gradient,
    const Band& band, int32_t row0, int32_t col0) {
  const int32_t row_end = min(row0 + Config::kBlockQ, band.q_len);
  if (kGeneral || !band.all_allowed(row0, row_end, col0, col0 + Config::kBlockKv)) {
    gradient.mask(scores, band);
  }
}

// Computes P from the scores, dP = dO V^T and dS = P (dP - delta), and stores P and dS. The
// exponentials are interleaved with the products, because they do not use the tensor cores.
template <typename Element, typename Config, bool kGeneral, int kM, int kN>
__device__ __forceinline__ void differentiate_scores(
    float (&scores)[kM][kN][4], float (&dscores)[kM][kN][4],
    const ScoreGradient<kGeneral, kM, kN, Element>& gradient, const BackwardTiles<Config>& tiles,
    const float* lse_smem, const float* delta_smem, int stage, const WarpParts<Config>& parts,
    float to_log2) {
  constexpr int kSteps = Config::kValueDim / kStepCols<Element>;
  const int row = parts.score_row, col = parts.score_col;
  float lse_log2[kM][2];
  load_rows(lse_log2, lse_smem + row);
  set_zero(dscores);
  const BlockReader dout_reader(tiles.dout(stage), BlockOrder::kRowsFirst, row, 0);
  const BlockReader value_reader(tiles.value(), BlockOrder::kColsFirst, col, 0);
  matmul<Element, kSteps, kRoundedB>(
      dscores,
      [&](uint32_t (&a)[4], int m, int k) {
        ptx::ldmatrix_x4(a, dout_reader.at(m * 16, k * 2));
        gradient.probabilities(scores[m], lse_log2[m], to_log2, m, kN * k / kSteps,
                               kN * (k + 1) / kSteps);
      },
      [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, value_reader.at(n * 8, k * 2)); });
  float delta[kM][2];
  load_rows(delta, delta_smem + row);
  gradient.finish(scores, dscores, lse_log2, delta);
  store_fragments<Element>(tiles.probability(), row, col / 8, scores);
  store_fragments<Element>(tiles.dscore(), row, col / 8, dscores);
}

// Adds this block's part of a tile of dQ to the sums in global memory, in turn if workspace.turns.
template <typename Config, int kM, int kN>
__device__ __forceinline__ void add_in_turn(float* dquery_gmem, const float (&dquery)[kM][kN][4],
                                            const Backward& params,
                                            const BackwardWorkspace& workspace, const Band& band,
                                            int64_t first_batch_head, const QueryTileWalk& at,
                                            int32_t kv_tile, const WarpParts<Config>& parts) {
  const Shape& shape = params.shape;
  const int32_t row0 = at.tile * Config::kBlockQ;
  Turn turn = {nullptr, 0};
  if (workspace.turns) {
    const int64_t batch_head = first_batch_head + at.head;
    turn.counter = workspace.turns + batch_head * workspace.flags + at.tile;
    turn.mine = kv_tile - kv_tiles<Config::kBlockKv>(band, row0, row0 + Config::kBlockQ).first;
  }
  turn.wait();
  if constexpr (Config::kFloat32) {
    const Float32Rows rows(dquery_gmem + at.head * params.dquery.head, params.dquery.row,
                           shape.head_dim);
    add_float32_dquery<Config>(rows, row0 + parts.dquery_row, shape.q_len, parts.dquery_col,
                               params.options.scale, dquery);
  } else {
    add_dquery(dquery_gmem + (int64_t{at.head} * workspace.dquery_rows + row0) * shape.head_dim,
               DqueryOrderOf<Config>(shape.q_len - row0, shape.head_dim), dquery);
  }
  turn.pass();
}

// Stores dK and dV. 16-bit elements are staged in the tiles of K and V.
template <typename Config, typename Element, int kM, int kDkeyN, int kDvalueN>
__device__ __forceinline__ void store_gradients(const BackwardTiles<Config>& tiles,
                                                const Backward& params, const BatchIndex& batch,
                                                int32_t kv_head, int32_t col0,
                                                const WarpParts<Config>& parts,
                                                float (&dkey)[kM][kDkeyN][4],
                                                float (&dvalue)[kM][kDvalueN][4]) {
  constexpr int kKeyCols = WarpParts<Config>::kKeyCols;
  const Shape& shape = params.shape;
  if constexpr (Config::kFloat32) {
    const Float32Rows dkey_rows(batch.pointer<float>(params.dkey, kv_head), params.dkey.row,
                                shape.head_dim);
    const Float32Rows dvalue_rows(batch.pointer<float>(params.dvalue, kv_head), params.dvalue.row,
                                  shape.value_dim);
    store_float32_key_gradient<kKeyCols>(dkey_rows, col0 + parts.key_row, shape.kv_len,
                                         parts.key_col, params.options.scale, dkey);
    store_float32_key_gradient<kKeyCols>(dvalue_rows, col0 + parts.key_row, shape.kv_len,
                                         parts.key_col, 1.0f, dvalue);
  } else {
    store_key_gradient<Config::kThreads, kKeyCols>(
        tiles.key(), batch.pointer<Element>(params.dkey, kv_head) + col0 * params.dkey.row,
        params.dkey.row, shape.kv_len - col0, shape.head_dim, parts.key_row, parts.key_col,
        params.options.scale, dkey);
    store_key_gradient<Config::kThreads, kKeyCols>(
        tiles.value(), batch.pointer<Element>(params.dvalue, kv_head) + col0 * params.dvalue.row,
        params.dvalue.row, shape.kv_len - col0, shape.value_dim, parts.key_row, parts.key_col, 1.0f,
        dvalue);
  }
}

template <typename Config, typename Element, bool kGeneral>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace) {
  using Parts = WarpParts<Config>;
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv;
  const Shape& shape = params.shape;
  const Parts parts;
  const int32_t group = shape.heads / shape.kv_heads;
  extern __shared__ __align__(1024) uint8_t smem[];
  const BackwardTiles<Config> tiles{ptx::shared_address(smem)};
  const KeyTilePlace<kBlockKv> at(params, take_ticket(workspace.ticket), workspace.ticket);
  const BatchIndex batch(shape, at.batch_index);
  const int32_t col0 = at.tile * kBlockKv;
  const Band band(params, batch);
  const QueryLoader<Config, Element> loader{params, workspace, tiles, band,
                                            int64_t{at.batch_kv_head} * group};
  loader.set_head(batch, at.kv_head * group);
  QueryTileWalk walk{q_tiles<kBlockQ>(band, col0, col0 + kBlockKv), group};
  if (kGeneral && workspace.spans.query && !workspace.turns) {
    skip_other_segments<kBlockKv>(walk, workspace.spans, at.batch_index, at.tile);
  }
  walk.start<kBlockQ>();
  __shared__ uint32_t bad_keys_smem[kGeneral ? kBlockKv / 32 + 1 : 1];
  if (!walk.done()) {
    load_keys<Config, Element>(tiles, params, batch, band, at.kv_head, col0);
    loader.load_query(walk, 0);
    ptx::cp_async_commit_group();
    loader.load_dout(walk, 0);
    ptx::cp_async_commit_group();
    prepare_keys<Config, Element, kGeneral>(tiles, bad_keys_smem);
  }

  float dkey[Parts::kKeyM][Parts::kDkeyN][4], dvalue[Parts::kKeyM][Parts::kDvalueN][4];
  set_zero(dkey);
  set_zero(dvalue);

  for (int stage = 0; !walk.done(); stage ^= Config::kStages - 1) {
    const int32_t head = at.kv_head * group + walk.head, row0 = walk.tile * kBlockQ;
    QueryTileWalk next = walk;
    next.advance<kBlockQ>();
    if constexpr (Config::kStages == 2) {
      // Q and dO have arrived, and all warps have read the previous ones, P and dS.
      wait_for_copies<0>();
      if (!next.done()) loader.load_both(next, stage ^ 1);
      ptx::cp_async_commit_group();
    } else {
      wait_for_copies<1>();  // Q has arrived
    }

    float scores[Parts::kScoreM][Parts::kScoreN][4], dscores[Parts::kScoreM][Parts::kScoreN][4];
    multiply_by_transpose<Element>(scores, tiles.query(stage), parts.score_row, tiles.key(),
                                   parts.score_col);
    const ScoreGradient<kGeneral, Parts::kScoreM, Parts::kScoreN, Element> gradient(
        params, batch, head, row0 + parts.score_row, col0 + parts.score_col);
    if constexpr (kGeneral) mark_bad_keys<kBlockKv>(scores, bad_keys_smem, parts.score_col);
    mask_scores<Config>(scores, gradient, band, row0, col0);
    if constexpr (Config::kStages == 1) wait_for_copies<0>();  // dO has arrived
    differentiate_scores<Element>(scores, dscores, gradient, tiles, loader.lse(stage),
                                  loader.delta(stage), stage, parts, params.options.scale * kLog2E);
    if constexpr (kGeneral && Config::kFloat32) {
      add_bias_gradient(params, batch, head, row0 + parts.score_row, col0 + parts.score_col,
                        dscores);
    }
    __syncthreads();
    add_transpose_product<Element, Parts::kKeyCols>(dkey, tiles.dscore(), parts.key_row,
                                                    tiles.query(stage), parts.key_col);
    if constexpr (Config::kStages == 1) loader.replace_query(next);
    add_transpose_product<Element, Parts::kKeyCols>(dvalue, tiles.probability(), parts.key_row,
                                                    tiles.dout(stage), parts.key_col);
    if constexpr (Config::kStages == 1) loader.replace_dout(next);

    float dquery[Parts::kDqueryM][Parts::kDqueryN][4];
    multiply<Element, Parts::kQueryCols>(dquery, tiles.dscore(), parts.dquery_row, tiles.key(),
                                         parts.dquery_col);
    add_in_turn<Config>(loader.dquery_gmem(), dquery, params, workspace, band,
                        loader.first_batch_head, walk, at.tile, parts);
    walk = next;
  }

  wait_for_copies<0>();  // all warps have read K and V: dK and dV take their places
  store_gradients<Config, Element>(tiles, params, batch, at.kv_head, col0, parts, dkey, dvalue);
}

}  // namespace jax_flash::sm80
