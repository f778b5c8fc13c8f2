// Computes the forward pass for head dims above 256, with every modifier.
//
//   for each tile of keys and values that some row of the block may attend to
//     S = Q K^T                     a warp computes some of the tile's keys
//     m = max(m, S)                 m: the row's running maximum, over the keys of all warps
//     P = 2^(log2(e) (S - m))       a warp computes its keys
//     O = O 2^(m_old - m) + P V     a warp computes some of the columns, for all keys
//   out = O / l, lse = m + log l    l: the row's sum of P
//
// The output of 64 rows takes half of the registers of a multiprocessor, too many for one warp per
// 16 rows. The warps of a group therefore share rows: they divide the keys for S and the columns
// for O, so that S is computed only once. For each key tile, they exchange in shared memory
//   1. sums of S, if a pair of warps divides them (WideForwardConfig::kShares)
//   2. the rows' greatest logits, and bits of the keys that are attended to
//   3. P
// and the named barrier of the group follows each of the three. Copies are as in forward/kernel.cuh
// with one stage: V during Q K^T, and the next K during the softmax and P V.
//
// Shared memory: Q | K | V | P | sums of S. Static shared memory holds numbers of rows and bits.
#pragma once

#include <cstdint>

#include "modifiers/scores.cuh"
#include "params.h"
#include "ptx/cp_async.cuh"
#include "ptx/warpgroup.cuh"
#include "sm80/forward/kernel.cuh"
#include "sm80/products.cuh"
#include "sm80/wide_config.cuh"
#include "tile/band.cuh"
#include "tile/batch_index.cuh"
#include "tile/quad.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm80 {

// Says what a warp computes, and exchanges numbers among the warps of a group, which share rows.
template <typename Config>
struct WideForwardPart {
  static constexpr int kM = Config::kM;

  int group = threadIdx.x / 32 / Config::kColWarps;
  int part = threadIdx.x / 32 % Config::kColWarps;  // the number of the warp in its group
  int row = group * kM * 16, key = part * Config::kScoreN * 8, chunk = part * Config::kOutN;

  // Return the place of the warp's rows in the tile of P (WideForwardConfig::kHalves).
  static constexpr int kRows = Config::ProbabilityTile::kRows;
  __device__ __forceinline__ int probability_row() const { return row % kRows; }
  __device__ __forceinline__ int probability_chunk() const { return row / kRows * 4; }

  // Waits for the other warps of the group.
  __device__ __forceinline__ void wait() const {
    ptx::barrier_sync(1 + group, 32 * Config::kColWarps);
  }

  // Passes a number of each row, equal in the lanes of a quad, to the other warps of the group.
  __device__ __forceinline__ void put(const float (&values)[kM][2]) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (threadIdx.x % 4 == 0) rows(part)[row + fragment_row(m, 2 * half)] = values[m][half];
      }
    }
  }
  // Combines the numbers of all warps of the group, after wait(). The order is the same in each
  // warp, so that all get the same bits.
  template <typename Combine>
  __device__ __forceinline__ void get(float (&values)[kM][2], Combine combine) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = row + fragment_row(m, 2 * half);
        values[m][half] = rows(0)[at];
#pragma unroll
        for (int i = 1; i < Config::kColWarps; ++i) {
          values[m][half] = combine(values[m][half], rows(i)[at]);
        }
      }
    }
  }
  // Exchange the bits of attended_columns() in the same way.
  __device__ __forceinline__ void put_bits(uint32_t bits) const {
    if (threadIdx.x % 32 < 4) words(group, part)[threadIdx.x % 4] = bits;
  }
  __device__ __forceinline__ uint32_t get_bits() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < Config::kColWarps; ++i) {
      bits |= words(group, i)[threadIdx.x % 4] << (i * 2 * Config::kScoreN);
    }
    return bits;
  }

 private:
  static __device__ __forceinline__ float* rows(int part) {
    __shared__ float smem[Config::kColWarps][Config::kBlockQ];
    return smem[part];
  }
  static __device__ __forceinline__ uint32_t* words(int group, int part) {
    __shared__ uint32_t smem[Config::kRowWarps][Config::kColWarps][4];
    return smem[group][part];
  }
};

// S = Q K^T for a warp's keys.
template <typename Config, typename Element, int kM, int kN>
__device__ __forceinline__ void multiply_wide_scores(float (&scores)[kM][kN][4],
                                                     const ForwardTiles<Config>& tiles,
                                                     int32_t head_dim,
                                                     const WideForwardPart<Config>& part) {
  if constexpr (Config::kShares == 1) {
    multiply_first_columns<Element>(scores, tiles.query(), part.row, tiles.key(0), part.key,
                                    head_dim);
  } else {
    const int half = part.part % 2;
    float sums[kM][2 * kN][4];
    multiply_first_columns<Element, 2>(sums, tiles.query(), part.row, tiles.key(0),
                                       part.key - half * kN * 8, head_dim, half);
    const uint32_t slots = tiles.base + Config::kHandoverOffset + threadIdx.x % 32 * 16;
    const uint32_t mine = slots + threadIdx.x / 32 * Config::kHandoverBytes;
    const uint32_t other = slots + (threadIdx.x / 32 ^ 1) * Config::kHandoverBytes;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float given[kN][4];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[m][n][e] = half ? sums[m][n + kN][e] : sums[m][n][e];
          given[n][e] = half ? sums[m][n][e] : sums[m][n + kN][e];
        }
      }
      put_fragments(other + m * kN * 512, given);
    }
    part.wait();
#pragma unroll
    for (int m = 0; m < kM; ++m) add_fragments(mine + m * kN * 512, scores[m]);
  }
}

// Raises the running maxima for a tile's logits and rescales the output, as
// OnlineSoftmax::update_maximum() does. Returns the bits of the keys of the whole tile that some
// row of the group attends to.
template <typename Config, int kM, int kN, int kOutN>
__device__ __forceinline__ uint32_t update_wide_maximum(OnlineSoftmax<kM, true>& softmax,
                                                        const float (&logits)[kM][kN][4],
                                                        float to_log2, float (&out)[kM][kOutN][4],
                                                        const WideForwardPart<Config>& part) {
  float greatest[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float value = minus_infinity();
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        value = fmaxf(value, fmaxf(logits[m][n][2 * half], logits[m][n][2 * half + 1]));
      }
      value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 1));
      greatest[m][half] = fmaxf(value, __shfl_xor_sync(0xffffffff, value, 2));
    }
  }
  part.put(greatest);
  part.put_bits(attended_columns(logits));
  part.wait();
  part.get(greatest, [](float a, float b) { return fmaxf(a, b); });
  bool rises = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rises |= (greatest[m][half] - softmax.maximum[m][half]) * to_log2 > softmax.kSlack;
    }
  }
  if (__any_sync(0xffffffff, rises)) {
    float factor[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor[m][half] = softmax.raise(m, half, greatest[m][half], to_log2);
      }
    }
    softmax.rescale(out, factor);
  }
  return part.get_bits();
}

// Turns logits into P, clears dropped elements, and stores P for the other warps of the group.
template <typename Config, typename Element, int kM, int kN>
__device__ __forceinline__ void store_probabilities(float (&logits)[kM][kN][4],
                                                    OnlineSoftmax<kM, true>& softmax, float to_log2,
                                                    const Forward& params, const BatchIndex& batch,
                                                    int32_t head, int32_t row0, int32_t col0,
                                                    const typename Config::ProbabilityTile& tile,
                                                    const WideForwardPart<Config>& part) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) softmax.exponentials(logits[m][n], m, to_log2);
  }
  if (params.options.dropout_threshold != 0) {
    Kept kept[kM];
    find_kept<kN>(kept, LogitModifiers(params, batch, head), row0, col0);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!kept[m].template at<false>(n, e)) logits[m][n][e] = 0.0f;
        }
      }
    }
  }
  store_fragments<Element>(tile, part.probability_row(), part.probability_chunk() + part.part * kN,
                           logits);
}

// Adds up the sums of P of all warps of a group. Afterwards lane 0 of each quad holds a row's sum,
// and the other lanes hold 0, because finish_rows() adds up the lanes of a quad.
template <typename Config, int kM>
__device__ __forceinline__ void share_sums(OnlineSoftmax<kM, true>& softmax,
                                           const WideForwardPart<Config>& part) {
  float total[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[m][half];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      total[m][half] = sum + __shfl_xor_sync(0xffffffff, sum, 2);
    }
  }
  part.put(total);
  part.wait();
  part.get(total, [](float a, float b) { return a + b; });
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      softmax.sum[m][half] = threadIdx.x % 4 == 0 ? total[m][half] : 0.0f;
    }
  }
}

// Stores a warp's columns of out.
template <typename Element, typename Config, int kM, int kOutN>
__device__ __forceinline__ void store_columns(const Forward& params, const BatchIndex& batch,
                                              int32_t head, int32_t row0,
                                              const float (&out)[kM][kOutN][4],
                                              const WideForwardPart<Config>& part) {
  const int32_t col = part.chunk * kChunk;
  Element* const out_gmem = batch.pointer<Element>(params.out, head) + col;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int32_t row = row0 + part.row + m * 16;
    store_rows(out_gmem + row * params.out.row, params.out.row, params.shape.q_len - row,
               params.shape.value_dim - col, 1.0f, out[m]);
  }
}

// Computes out and lse. The grid is batch x head x query tiles. `modified` is true if the call has
// modifiers.
template <typename Config, typename Element>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_forward_kernel(const __grid_constant__ Forward params, const SegmentSpans spans,
                        bool modified) {
  constexpr int kBlockQ = Config::kBlockQ, kBlockKv = Config::kBlockKv, kM = Config::kM;
  const Shape& shape = params.shape;
  const WideForwardPart<Config> part;
  const QueryTilePlace<kBlockQ> at(params, blockIdx.x, Config::kLongestFirst);
  const BatchIndex batch(shape, at.batch_index);
  const int32_t row0 = at.tile * kBlockQ;
  const Band band(params, batch);
  const Range range = kv_tiles<kBlockKv>(band, row0, row0 + kBlockQ);
  KeyTileWalk walk = {range.first, range.end};
  if (spans.query) skip_other_segments<kBlockQ>(walk, spans, at.batch_index, at.tile);
  walk.tile = walk.skip_to<kBlockKv>(walk.tile);

  extern __shared__ __align__(1024) uint8_t smem[];
  const ForwardTiles<Config> tiles{ptx::shared_address(smem)};
  const typename Config::ProbabilityTile probability{tiles.base, Config::kProbabilityOffset};
  const TileLoader<Config, Element> loader{params, tiles, band, row0};
  loader.set_head(batch, at.head / (shape.heads / shape.kv_heads));
  if (walk.tile < walk.end) {
    loader.load_query(batch, at.head);
    loader.load_key(walk.tile, 0);
    ptx::cp_async_commit_group();
  }

  float out[kM][Config::kOutN][4];
  set_zero(out);
  OnlineSoftmax<kM, true> softmax;
  const float to_log2 = in_natural_units(params) ? kLog2E : 1.0f;
  while (walk.tile < walk.end) {
    const int32_t col0 = walk.tile * kBlockKv;
    const int32_t next = walk.skip_to<kBlockKv>(walk.tile + 1);
    wait_for_copies();  // K has arrived, and all warps have read V and P of the previous tile
    loader.load_value(walk.tile, 0);
    ptx::cp_async_commit_group();
    float logits[kM][Config::kScoreN][4];
    multiply_wide_scores<Config, Element>(logits, tiles, shape.head_dim, part);
    wait_for_copies();  // V has arrived, and all warps have read K
    if (next < walk.end) loader.load_key(next, 0);
    ptx::cp_async_commit_group();

    const int32_t warp_row0 = row0 + part.row, warp_col0 = col0 + part.key;
    if (modified) {
      modify_tile<kEveryModifier, true>(logits, params, batch, at.head, band, warp_row0, warp_col0);
    } else {
      scale_tile(logits, params, band, warp_row0, warp_col0);
    }
    const uint32_t attended = update_wide_maximum(softmax, logits, to_log2, out, part);
    store_probabilities<Config, Element>(logits, softmax, to_log2, params, batch, at.head,
                                         warp_row0, warp_col0, probability, part);
    part.wait();
    add_kept_product<Element>(out,
                              BlockReader(probability, BlockOrder::kRowsFirst,
                                          part.probability_row(), part.probability_chunk()),
                              BlockReader(tiles.value(0), BlockOrder::kRowsFirst, 0, part.chunk),
                              attended);
    walk.tile = next;
  }

  share_sums(softmax, part);
  finish_rows<Element>(out, softmax, to_log2, params, batch, at.head, row0 + part.row, band);
  store_columns<Element>(params, batch, at.head, row0, out, part);
}

}  // namespace jax_flash::sm80
