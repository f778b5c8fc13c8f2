// Decides which probabilities dropout keeps, in accumulator fragments and in those of the
// transposed product: modifiers/philox.h defines the bits.
#pragma once

#include <cstdint>

#include "modifiers/philox.h"
#include "params.h"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Says which elements of 16 x 8 kN fragments, kN <= 16, are kept. A pair of words, as a group of
// modifiers/philox.h has: bit n / 2 * 2 + e % 2 of a half is for the elements of blocks n and
// n + 1, n even, that draw from this half.
struct Kept {
  uint32_t word[2];

  // Says so for element e of block n; in fragments of the transposed product columns are queries.
  template <bool kTransposed>
  __device__ __forceinline__ bool at(int n, int e) const {
    const int query = kTransposed ? n % 2 : e / 2, key = kTransposed ? e / 2 : n % 2;
    return word[query] >> (key * 16 + n / 2 * 2 + e % 2) & 1;
  }
  // Sets the bits of a group that is element e of blocks n and n + 1, n even, given its verdicts.
  __device__ __forceinline__ void set(int n, int e, const PhiloxPair& verdicts) {
#pragma unroll
    for (int i = 0; i < 2; ++i) word[i] |= (verdicts.word[i] & 0x80008000) >> (15 - n - e);
  }
};

// Holds what the bits of one batch and head depend on, besides row and column.
struct Dropout {
  DropoutKeys keys;
  uint32_t first_row = 0, first_col = 0;  // the indices that row 0 and column 0 count as

  __device__ __forceinline__ void begin(const Forward& params, const BatchIndex& index,
                                        int32_t query_head) {
    const uint32_t* words = index.pointer<const uint32_t>(params.dropout_keys, query_head);
    const int64_t stride = params.dropout_keys.col;
    keys = {words[0], words[stride], words[2 * stride]};
    if (params.dropout_start) {
      const uint32_t* start = index.pointer<const uint32_t>(params.dropout_start);
      first_row = start[0];
      first_col = start[params.dropout_start.col];
    }
  }

  // What is added to both halves of a word, so that bits 15 and 31 say whether they are kept.
  static __device__ __forceinline__ uint32_t addend(const Options& options) {
    return (kDropoutBits + 1 - options.dropout_threshold) * 0x10001;
  }
  static __device__ __forceinline__ PhiloxPair compare(const PhiloxPair& drawn, uint32_t addend) {
    constexpr uint32_t kBits = kDropoutBits * 0x10001;
    return {{(drawn.word[0] & kBits) + addend, (drawn.word[1] & kBits) + addend}};
  }

  // Says which elements are kept of fragments of 16 queries from row0 on by 8 kN keys from col0 on,
  // or of 16 keys by 8 kN queries if kTransposed. row0 and col0 are multiples of 16.
  template <int kN, bool kTransposed>
  __device__ __forceinline__ Kept kept(const Options& options, int32_t row0, int32_t col0) const {
    static_assert(kN % 2 == 0 && kN <= 16);
    const uint32_t row = first_row + row0, col = first_col + col0;
    Kept kept = {};
    if ((first_row | first_col) % kDropoutBlock == 0) {
      const uint32_t offset = addend(options), lane = fragment_row(0, 0);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t along = fragment_col(0, e) + n * 4;
          const uint32_t query = (row / 2 + (kTransposed ? along : lane)) ^ keys.row;
          const uint32_t key = (col / 2 + (kTransposed ? lane : along)) ^ keys.col;
          kept.set(n, e, compare(philox2x32_7(query, key, keys.key), offset));
        }
      }
      return kept;
    }
    // Groups do not lie in fragments.
#pragma unroll 1
    for (int n = 0; n < kN; n += 2) {
#pragma unroll 1
      for (int e = 0; e < 2; ++e) kept.set(n, e, one_by_one<kTransposed>(options, row, col, n, e));
    }
    return kept;
  }

 private:
  // Draws the elements that are in the places of a group, and compares them.
  template <bool kTransposed>
  __device__ __forceinline__ PhiloxPair one_by_one(const Options& options, uint32_t row,
                                                   uint32_t col, int n, int e) const {
    const uint32_t across = fragment_row(0, 0), along = fragment_col(n, e);
    row += kTransposed ? along : across;
    col += kTransposed ? across : along;
    PhiloxPair verdicts = {};
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = dropout_bits(keys, row + i / 2 * 8, col + i % 2 * 8);
      const uint32_t bit = (bits >= options.dropout_threshold ? 0x8000u : 0u) << i % 2 * 16;
      if (i < 2) {
        verdicts.word[0] |= bit;
      } else {
        verdicts.word[1] |= bit;
      }
    }
    return verdicts;
  }
};

}  // namespace jax_flash
