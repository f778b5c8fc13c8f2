// Decides which probabilities dropout keeps, in accumulator fragments and in those of the
// transposed product: the same bits as modifiers/philox.h defines them.
#pragma once

#include <cstdint>

#include "modifiers/philox.h"
#include "params.h"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Holds what the random words of one batch and head depend on, besides row and column.
struct Dropout {
  uint32_t seed0 = 0, seed1 = 0, batch = 0, head = 0;
  uint32_t first_row = 0, first_col = 0;  // the indices that row 0 and column 0 count as

  __device__ __forceinline__ void begin(const Forward& params, const BatchIndex& index,
                                        int32_t query_head) {
    const uint32_t* seed = index.pointer<const uint32_t>(params.dropout_seed);
    seed0 = seed[0];
    seed1 = seed[params.dropout_seed.col];
    batch = *index.pointer<const uint32_t>(params.dropout_batch_ids);
    head = *index.pointer<const uint32_t>(params.dropout_head_ids, query_head);
    if (params.dropout_start) {
      const uint32_t* start = index.pointer<const uint32_t>(params.dropout_start);
      first_row = start[0];
      first_col = start[params.dropout_start.col];
    }
  }

  __device__ __forceinline__ PhiloxWords words(uint32_t row, uint32_t col0, uint32_t col) const {
    return dropout_words(seed0, seed1, batch, head, first_row + row, first_col + col0 + col);
  }

  // Bit 2 n + e of the result is set if dropout keeps column fragment_col(n, e) of `row`. Called by
  // whole warps; col0 is a multiple of kDropoutGroup. One counter serves the eight columns of a
  // block, which four lanes hold: each lane draws for one of kShared blocks, and the lanes exchange
  // words.
  template <int kN>
  __device__ __forceinline__ uint32_t kept(const Options& options, int32_t row,
                                           int32_t col0) const {
    constexpr int kShared = kN % 4 == 0 ? 4 : 2;
    static_assert(kN % kShared == 0 && kN <= 16 && kDropoutGroup == 8);
    const int lane = threadIdx.x % 4;
    uint32_t bits = 0;
#pragma unroll
    for (int n0 = 0; n0 < kN; n0 += kShared) {
      const int mine = n0 + lane % kShared;
      const PhiloxWords drawn = words(row, col0, mine * kDropoutGroup);
#pragma unroll
      for (int distance = 0; distance < kShared; ++distance) {
        const int wanted = lane ^ distance;  // the partner's lane, and the word that it needs
        const uint32_t low = wanted & 1 ? drawn.word[1] : drawn.word[0];
        const uint32_t high = wanted & 1 ? drawn.word[3] : drawn.word[2];
        const uint32_t pair = __shfl_xor_sync(0xffffffff, wanted & 2 ? high : low, distance);
        const uint32_t keep = ((pair & 0xffff) >= options.dropout_threshold ? 1 : 0) |
                              (pair >> 16 >= options.dropout_threshold ? 2 : 0);
        bits |= keep << 2 * (n0 + (wanted % kShared));
      }
    }
    return bits;
  }

  // Does so for fragments whose rows are keys from key0 on, a multiple of 16, and whose columns are
  // queries from row0 on: bit 2 (n % 16) + e % 2 of kept[e / 2][n / 16] is for element e of block
  // n. One counter serves eight keys of one query, which the eight lanes of equal threadIdx.x % 4
  // hold: each of them draws for one of eight pairs of query and key group, and they exchange
  // words.
  template <int kN>
  __device__ __forceinline__ void kept_transposed(const Options& options, int32_t key0,
                                                  int32_t row0,
                                                  uint32_t (&kept)[2][(kN + 15) / 16]) const {
    static_assert(kN % 2 == 0 && kDropoutGroup == 8);
    const int lane = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n0 = 0; n0 < kN; n0 += 2) {
      // Lane g draws for query column g % 2 of block n0 + g / 2 % 2, keys of half g / 4.
      const uint32_t row = row0 + fragment_col(n0 + lane / 2 % 2, lane % 2);
      const PhiloxWords drawn = words(row, key0, lane / 4 * kDropoutGroup);
#pragma unroll
      for (int distance = 0; distance < 8; ++distance) {
        const int partner = lane ^ distance;  // the partner needs element `partner`; the words that
                                              // it drew are for counter `partner`
        const uint32_t low = partner & 2 ? drawn.word[1] : drawn.word[0];
        const uint32_t high = partner & 2 ? drawn.word[3] : drawn.word[2];
        uint32_t word = __shfl_xor_sync(0xffffffff, partner & 4 ? high : low, distance * 4);
        word = lane & 1 ? word >> 16 : word & 0xffff;
        const uint32_t keep = word >= options.dropout_threshold ? 1 : 0;
        const uint32_t bit = keep << ((n0 + partner / 2 % 2) % 16 * 2 + partner % 2);
        if (partner & 4) {
          kept[1][n0 / 16] |= bit;
        } else {
          kept[0][n0 / 16] |= bit;
        }
      }
    }
  }
};

}  // namespace jax_flash
