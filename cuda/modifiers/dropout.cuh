// Draws the random bits of dropout in accumulator fragments of S = Q K^T or of S^T = K Q^T, and
// decides which probabilities are kept. modifiers/philox.h defines the bits, and the groups of four
// elements that one draw serves.
#pragma once

#include <cstdint>

#include "modifiers/philox.h"
#include "params.h"
#include "tile/batch_index.cuh"
#include "tile/matmul.cuh"

namespace jax_flash {

// Holds the elements of 16 x 8 kN fragments, kN <= 16, that are kept. The two words, and their
// halves, correspond to those of a group of modifiers/philox.h. Bit n / 2 * 2 + e % 2 of a half
// belongs to the element of blocks n and n + 1, n even, that draws from this half.
struct Kept {
  uint32_t word[2];

  // Returns true if element e of block n is kept. kTransposed: the fragments' columns are queries.
  template <bool kTransposed>
  __device__ __forceinline__ bool at(int n, int e) const {
    const int query = kTransposed ? n % 2 : e / 2, key = kTransposed ? e / 2 : n % 2;
    return word[query] >> (key * 16 + n / 2 * 2 + e % 2) & 1;
  }
  // Sets the bits of the group of element e of blocks n and n + 1, n even, from its verdicts().
  __device__ __forceinline__ void set(int n, int e, const PhiloxPair& verdicts) {
#pragma unroll
    for (int i = 0; i < 2; ++i) word[i] |= (verdicts.word[i] & 0x80008000) >> (15 - n - e);
  }
};

// Holds the Dropout::verdicts() of all groups: [n / 2][e] is for element e of blocks n and n + 1, n
// even.
template <int kN>
using KeptGroups = PhiloxPair[kN / 2][2];

// Holds the keys and the origin of one batch and head, from which row and column determine the
// bits.
struct Dropout {
  DropoutKeys keys;
  uint32_t first_row, first_col;  // global indices of row 0 and column 0

  Dropout() = default;
  // `at(operand)` returns the address of an operand's first word for the batch and head.
  template <typename At>
  __device__ __forceinline__ Dropout(const Forward& params, At at)
      : keys{}, first_row(0), first_col(0) {
    if (params.options.dropout_threshold == 0) return;
    const uint32_t* words = at(params.dropout_keys);
    const int64_t stride = params.dropout_keys.col;
    keys = {words[0], words[stride], words[2 * stride]};
    if (params.dropout_start) {
      const uint32_t* start = at(params.dropout_start);
      first_row = start[0];
      first_col = start[params.dropout_start.col];
    }
  }
  __device__ __forceinline__ Dropout(const Forward& params, const BatchIndex& batch, int32_t head)
      : Dropout(params, [&]([[maybe_unused]] const Operand& operand) {
          return batch.pointer<const uint32_t>(operand, head);
        }) {}

  // Returns a copy that the compiler knows to be uniform; the keys of all rounds are then uniform,
  // too. Called by whole warps.
  __device__ __forceinline__ Dropout uniform() const {
    const auto same = [](uint32_t word) { return __reduce_max_sync(0xffffffff, word); };
    Dropout result;
    result.keys = {same(keys.key), same(keys.row), same(keys.col)};
    result.first_row = same(first_row);
    result.first_col = same(first_col);
    return result;
  }

  // Returns true if groups are in the places that draw() assumes.
  __device__ __forceinline__ bool aligned() const {
    return (first_row | first_col) % kDropoutBlock == 0;
  }

  // Draws the words of one group: that of element e, 0 or 1, of block n, which is even. The
  // fragments are of queries from row0 on and keys from col0 on; their rows are queries, or keys if
  // kTransposed. row0 and col0 are multiples of 16. Needs aligned().
  template <bool kTransposed>
  __device__ __forceinline__ PhiloxPair draw(int32_t row0, int32_t col0, int n, int e) const {
    const uint32_t row = (first_row + row0) / 2, col = (first_col + col0) / 2;
    const uint32_t across = fragment_row(0, 0), along = fragment_col(0, e) + n * 4;
    return philox2x32_7((row + (kTransposed ? along : across)) ^ keys.row,
                        (col + (kTransposed ? across : along)) ^ keys.col, keys.key);
  }
  // Compares drawn words with the threshold. Bits 15 and 31 of the result are set if the elements
  // of the lower and the upper half are kept.
  static __device__ __forceinline__ PhiloxPair verdicts(const PhiloxPair& drawn,
                                                        uint32_t threshold) {
    constexpr uint32_t kBits = kDropoutBits * 0x10001;
    const uint32_t addend = (kDropoutBits + 1 - threshold) * 0x10001;
    return {{(drawn.word[0] & kBits) + addend, (drawn.word[1] & kBits) + addend}};
  }

  // Returns the elements of fragments of 8 kN columns that are kept.
  template <int kN, bool kTransposed>
  __device__ __forceinline__ Kept kept(uint32_t threshold, int32_t row0, int32_t col0) const {
    if (!aligned()) return gather<kN, kTransposed>(threshold, row0, col0);
    Kept kept = {};
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        kept.set(n, e, verdicts(draw<kTransposed>(row0, col0, n, e), threshold));
      }
    }
    return kept;
  }

  // Does the same, but keeps verdicts() of each group, which takes fewer instructions and more
  // registers. They are computed where this is called, not where they are used.
  template <int kN, bool kTransposed>
  __device__ __forceinline__ void draw_all(KeptGroups<kN>& kept, uint32_t threshold, int32_t row0,
                                           int32_t col0) const {
    if (aligned()) [[likely]] {
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          kept[n / 2][e] = verdicts(draw<kTransposed>(row0, col0, n, e), threshold);
        }
      }
    } else {
      const Kept gathered = gather<kN, kTransposed>(threshold, row0, col0);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          kept[n / 2][e].word[n % 2] = gathered.word[n % 2] << (15 - n / 2 * 2 - e);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) asm volatile("" : "+r"(kept[n / 2][e].word[n % 2]));
    }
  }

 private:
  // Returns the bits of element i, 0 to 3, of a group, if groups are not in the places that draw()
  // assumes.
  template <bool kTransposed>
  __device__ __forceinline__ uint32_t draw_one(int32_t row0, int32_t col0, int n, int e,
                                               int i) const {
    const uint32_t across = fragment_row(0, 0), along = fragment_col(n, e);
    const uint32_t row = first_row + row0 + (kTransposed ? along : across);
    const uint32_t col = first_col + col0 + (kTransposed ? across : along);
    return dropout_bits(keys, row + i / 2 * 8, col + i % 2 * 8);
  }

  // Does the work of kept() if groups are not in the places that draw() assumes.
  template <int kN, bool kTransposed>
  __device__ __forceinline__ Kept gather(uint32_t threshold, int32_t row0, int32_t col0) const {
    static_assert(kN % 2 == 0 && kN <= 16);
    Kept kept = {};
#pragma unroll 1
    for (int n = 0; n < kN; n += 2) {
#pragma unroll 1
      for (int e = 0; e < 2; ++e) {
        PhiloxPair drawn = {};
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          drawn.word[0] |= draw_one<kTransposed>(row0, col0, n, e, i) << 16 * i;
          drawn.word[1] |= draw_one<kTransposed>(row0, col0, n, e, i + 2) << 16 * i;
        }
        kept.set(n, e, verdicts(drawn, threshold));
      }
    }
    return kept;
  }
};

}  // namespace jax_flash
