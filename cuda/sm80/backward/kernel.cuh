// Computes the backward pass by warp-level matrix instructions, after FlashAttention-2
// (arXiv:2307.08691).
//
//   for each query head of the group, for each tile of rows that may attend to the block's keys
//     S = Q K^T,  dP = dO V^T         each warp its part of the tile
//     P = 2^(scale log2(e) S - lse),  dS = P (dP - delta)
//     P, dS to shared memory: the products below divide them otherwise
//     dV += P^T dO,  dK += dS^T Q     accumulators of the block
//     dQ += dS K                      added to float32 sums in global memory
//
// A block owns its keys for all query heads of the group, so dK and dV need no atomics. Only dQ is
// shared by blocks; when the result must not depend on their timing, they add in turns, in the
// order of their keys. Blocks then take their keys by ticket, so that a block only waits for blocks
// that have started before it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"
#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

template <typename Config, typename Element, bool kGeneral>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    backward_kernel(const __grid_constant__ Backward params, const BackwardWorkspace workspace) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv, kWarps = Config::kWarps;
  constexpr int kScoreCols = kWarps / Config::kScoreWarpRows;
  constexpr int kKeyCols = kWarps / Config::kKeyWarpRows;
  constexpr int kQueryCols = kWarps / Config::kQueryWarpRows;
  constexpr int kScoreM = kBlockQ / 16 / Config::kScoreWarpRows,
                kScoreN = kBlockKv / 8 / kScoreCols;
  constexpr int kKeyM = kBlockKv / 16 / Config::kKeyWarpRows;
  constexpr int kDkeyN = Config::kHeadDim / 8 / kKeyCols;
  constexpr int kDvalueN = Config::kValueDim / 8 / kKeyCols;
  constexpr int kDqueryM = kBlockQ / 16 / Config::kQueryWarpRows;
  constexpr int kDqueryN = Config::kHeadDim / 8 / kQueryCols;
  constexpr auto kRowsFirst = BlockOrder::kRowsFirst, kColsFirst = BlockOrder::kColsFirst;
  const Shape& shape = params.shape;
  const int warp = threadIdx.x / 32;
  const int32_t group = shape.heads / shape.kv_heads;

  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = ptx::shared_address(smem);
  const typename Config::KeyTile key_smem{base, 0};
  const typename Config::ValueTile value_smem{base, Config::kValueOffset};
  const typename Config::ScoreTile probability_smem{base, Config::kProbabilityOffset};
  const typename Config::ScoreTile score_smem{base, Config::kScoreOffset};
  const auto query_smem = [&](uint32_t stage) {
    return
        typename Config::QueryTile{base, Config::kQueryOffset + stage * Config::QueryTile::kBytes};
  };
  const auto dout_smem = [&](uint32_t stage) {
    return typename Config::OutTile{base, Config::kOutOffset + stage * Config::OutTile::kBytes};
  };

  __shared__ uint32_t ticket_smem;
  uint32_t block = blockIdx.x;
  if (workspace.ticket) {
    if (threadIdx.x == 0) ticket_smem = static_cast<uint32_t>(atomicAdd(workspace.ticket, 1));
    __syncthreads();
    block = ticket_smem;
  }
  // Under a causal mask the first keys have the most rows, and go first. Blocks of one head share
  // its rows in L2. If they take turns, as few blocks of a head as possible run at the same time.
  const uint32_t kv_tiles_total = (shape.kv_len + kBlockKv - 1) / kBlockKv;
  const uint32_t heads_total = static_cast<uint32_t>(shape.batch * shape.kv_heads);
  const bool by_tile = workspace.ticket != nullptr;
  const int32_t kv_tile =
      static_cast<int32_t>(by_tile ? block / heads_total : block % kv_tiles_total);
  const uint32_t batch_kv_head = by_tile ? block % heads_total : block / kv_tiles_total;
  const int32_t kv_head = static_cast<int32_t>(batch_kv_head % shape.kv_heads);
  const int64_t batch_index = batch_kv_head / shape.kv_heads;
  const BatchIndex batch(shape, batch_index);
  const int32_t col0 = kv_tile * kBlockKv;

  const Band band(params, batch);
  // Needed once a tile; kept in shared memory, because registers are short.
  __shared__ const Element *query_gmem, *dout_gmem;
  __shared__ float* dquery_gmem;
  const int64_t first_batch_head = int64_t{batch_kv_head} * group;
  if (threadIdx.x == 0) {
    query_gmem = batch.pointer<const Element>(params.query, kv_head * group);
    dout_gmem = batch.pointer<const Element>(params.dout, kv_head * group);
    dquery_gmem = workspace.dquery + first_batch_head * workspace.dquery_rows * shape.head_dim;
  }
  __syncthreads();
  QueryTileWalk walk{q_tiles<kBlockQ>(band, col0, col0 + kBlockKv), group};
  if (kGeneral && workspace.spans.query && !workspace.turns) {
    const SegmentSpans& spans = workspace.spans;
    walk.query_blocks = spans.query_blocks;
    walk.query_spans = spans.query + batch_index * spans.query_blocks;
    walk.key_span =
        tile_span<kBlockKv>(spans.key + batch_index * spans.key_blocks, spans.key_blocks, kv_tile);
  }
  walk.start<kBlockQ>();

  __shared__ __align__(16) float lse_smem[Config::kStages][kBlockQ];
  __shared__ __align__(16) float delta_smem[Config::kStages][kBlockQ];
  const auto load_rows_of = [&](const QueryTileWalk& at, float* smem, const float* statistics) {
    load_statistics<kBlockQ>(smem, statistics, workspace, first_batch_head + at.head,
                             at.tile * kBlockQ);
  };
  const auto load_query = [&](const QueryTileWalk& at, int stage) {
    const int32_t row0 = at.tile * kBlockQ;
    load_tile<Config::kThreads>(query_smem(stage), query_gmem + at.head * params.query.head,
                                params.query.row, row0, row0, band.q_len, shape.head_dim);
    load_rows_of(at, lse_smem[stage], workspace.lse_log2);
  };
  const auto load_dout = [&](const QueryTileWalk& at, int stage) {
    const int32_t row0 = at.tile * kBlockQ;
    load_tile<Config::kThreads>(dout_smem(stage), dout_gmem + at.head * params.dout.head,
                                params.dout.row, row0, row0, band.q_len, shape.value_dim);
    load_rows_of(at, delta_smem[stage], workspace.delta);
  };
  __shared__ uint32_t bad_keys_smem[kGeneral ? kBlockKv / 32 + 1 : 1];
  if (!walk.done()) {
    // Keys and values that no row may attend to become zeros: see load_tile().
    const int32_t first = max(0, band.lo), end = min(band.kv_len, band.q_len - 1 + band.hi);
    load_tile<Config::kThreads>(key_smem, batch.pointer<const Element>(params.key, kv_head),
                                params.key.row, col0, first, end, shape.head_dim);
    load_tile<Config::kThreads>(value_smem, batch.pointer<const Element>(params.value, kv_head),
                                params.value.row, col0, first, end, shape.value_dim);
    load_query(walk, 0);
    ptx::cp_async_commit_group();
    load_dout(walk, 0);
    ptx::cp_async_commit_group();
    if constexpr (kGeneral) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      clear_bad_keys<Config::kThreads, Element>(key_smem, bad_keys_smem);
    }
  }

  float dkey[kKeyM][kDkeyN][4], dvalue[kKeyM][kDvalueN][4];
  set_zero(dkey);
  set_zero(dvalue);

  // Position of each warp in the three kinds of products.
  const int score_row = warp / kScoreCols * kScoreM * 16,
            score_col = warp % kScoreCols * kScoreN * 8;
  const int key_row = warp / kKeyCols * kKeyM * 16, key_col = warp % kKeyCols;
  const int dquery_row = warp / kQueryCols * kDqueryM * 16, dquery_col = warp % kQueryCols;
  const float to_log2 = params.options.scale * kLog2E;

  for (int stage = 0; !walk.done(); stage ^= Config::kStages - 1) {
    const int32_t head = kv_head * group + walk.head, row0 = walk.tile * kBlockQ;
    QueryTileWalk next = walk;
    next.advance<kBlockQ>();
    if constexpr (Config::kStages == 2) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // Q and dO have arrived; all have read the ones before, and P and dS
      if (!next.done()) {
        load_query(next, stage ^ 1);
        load_dout(next, stage ^ 1);
      }
      ptx::cp_async_commit_group();
    } else {
      ptx::cp_async_wait_group<1>();
      __syncthreads();  // Q has arrived
    }

    // S = Q K^T
    float scores[kScoreM][kScoreN][4];
    set_zero(scores);
    const BlockReader query_reader(query_smem(stage), kRowsFirst, score_row, 0);
    const BlockReader key_reader(key_smem, kColsFirst, score_col, 0);
    matmul<Element, Config::kHeadDim / 16>(
        scores,
        [&](uint32_t (&a)[4], int m, int k) {
          ptx::ldmatrix_x4(a, query_reader.at(m * 16, k * 2));
        },
        [&](uint32_t (&b)[4], int n, int k) { ptx::ldmatrix_x4(b, key_reader.at(n * 8, k * 2)); });
    const ScoreGradient<kGeneral, kScoreM, kScoreN> gradient(params, batch, head, row0 + score_row,
                                                             col0 + score_col);
    if constexpr (kGeneral) mark_bad_keys<kBlockKv>(scores, bad_keys_smem, score_col);
    if (kGeneral ||
        !band.all_allowed(row0, min(row0 + kBlockQ, band.q_len), col0, col0 + kBlockKv)) {
      gradient.mask(scores, band);
    }

    // dP = dO V^T, dS. Exponentials are placed among the products: they do not use the tensor
    // cores.
    if constexpr (Config::kStages == 1) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // dO has arrived
    }
    float lse_log2[kScoreM][2];
    load_rows(lse_log2, lse_smem[stage] + score_row);
    constexpr int kValueSteps = Config::kValueDim / 16;
    float dscores[kScoreM][kScoreN][4];
    set_zero(dscores);
    const BlockReader dout_reader(dout_smem(stage), kRowsFirst, score_row, 0);
    const BlockReader value_reader(value_smem, kColsFirst, score_col, 0);
    matmul<Element, kValueSteps>(
        dscores,
        [&](uint32_t (&a)[4], int m, int k) {
          ptx::ldmatrix_x4(a, dout_reader.at(m * 16, k * 2));
          gradient.probabilities(scores[m], lse_log2[m], to_log2, m, kScoreN * k / kValueSteps,
                                 kScoreN * (k + 1) / kValueSteps);
        },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4(b, value_reader.at(n * 8, k * 2));
        });
    float delta[kScoreM][2];
    load_rows(delta, delta_smem[stage] + score_row);
    gradient.finish(scores, dscores, lse_log2, delta);
    store_fragments<Element>(probability_smem, score_row, score_col / kChunk, scores);
    store_fragments<Element>(score_smem, score_row, score_col / kChunk, dscores);
    __syncthreads();

    // dK += dS^T Q, dV += P^T dO
    const BlockReader query_trans_reader(query_smem(stage), kRowsFirst, 0, key_col * 2);
    const BlockReader score_trans_reader(score_smem, kColsFirst, 0, key_row / kChunk);
    matmul<Element, kBlockQ / 16>(
        dkey,
        [&](uint32_t (&a)[4], int m, int k) {
          ptx::ldmatrix_x4_trans(a, score_trans_reader.at(k * 16, m * 2));
        },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(b, query_trans_reader.at(k * 16, n * kKeyCols));
        });
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // all have read Q
      if (!next.done()) load_query(next, 0);
      ptx::cp_async_commit_group();
    }
    const BlockReader dout_trans_reader(dout_smem(stage), kRowsFirst, 0, key_col * 2);
    const BlockReader probability_reader(probability_smem, kColsFirst, 0, key_row / kChunk);
    matmul<Element, kBlockQ / 16>(
        dvalue,
        [&](uint32_t (&a)[4], int m, int k) {
          ptx::ldmatrix_x4_trans(a, probability_reader.at(k * 16, m * 2));
        },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(b, dout_trans_reader.at(k * 16, n * kKeyCols));
        });
    if constexpr (Config::kStages == 1) {
      __syncthreads();  // all have read dO
      if (!next.done()) load_dout(next, 0);
      ptx::cp_async_commit_group();
    }

    // dQ += dS K
    const BlockReader score_reader(score_smem, kRowsFirst, dquery_row, 0);
    const BlockReader key_trans_reader(key_smem, kRowsFirst, 0, dquery_col * 2);
    float dquery[kDqueryM][kDqueryN][4];
    set_zero(dquery);
    matmul<Element, kBlockKv / 16>(
        dquery,
        [&](uint32_t (&a)[4], int m, int k) {
          ptx::ldmatrix_x4(a, score_reader.at(m * 16, k * 2));
        },
        [&](uint32_t (&b)[4], int n, int k) {
          ptx::ldmatrix_x4_trans(b, key_trans_reader.at(k * 16, n * kQueryCols));
        });
    Turn turn = {nullptr, 0};
    if (workspace.turns) {
      const int64_t batch_head = first_batch_head + walk.head;
      turn.counter = workspace.turns + batch_head * workspace.flags + walk.tile;
      turn.mine = kv_tile - kv_tiles<kBlockKv>(band, row0, row0 + kBlockQ).first;
    }
    turn.wait();
    add_dquery(dquery_gmem + (int64_t{walk.head} * workspace.dquery_rows + row0) * shape.head_dim,
               DqueryOrder<Config>(shape.q_len - row0, shape.head_dim), dquery);
    turn.pass();
    walk = next;
  }

  ptx::cp_async_wait_group<0>();
  __syncthreads();  // all have read K: dK takes its place, and dV that of V
  store_key_gradient<Config::kThreads, kKeyCols>(
      key_smem, batch.pointer<Element>(params.dkey, kv_head) + col0 * params.dkey.row,
      params.dkey.row, shape.kv_len - col0, shape.head_dim, key_row, key_col, params.options.scale,
      dkey);
  store_key_gradient<Config::kThreads, kKeyCols>(
      value_smem, batch.pointer<Element>(params.dvalue, kv_head) + col0 * params.dvalue.row,
      params.dvalue.row, shape.kv_len - col0, shape.value_dim, key_row, key_col, 1.0f, dvalue);
}

}  // namespace jax_flash::sm80
