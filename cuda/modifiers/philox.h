// Defines the random bits of dropout, for kernels and for the host.
//
// The bits are a pure function of the seed and of the global index (b, n, i, j) of a probability,
// so every tiling, device and sharding draws the same. philox.py derives three words for each (b,
// n) from the seed by Philox4x32-10 (DropoutKeys). These words are an operand. Within a batch and
// head, Philox2x32-7, keyed by the first word, draws 64 bits for a group of four probabilities:
//
//   (i, j), (i, j + 8), (i + 8, j), (i + 8, j + 8)    i % 16 < 8, j % 16 < 8
//
// One thread holds all four in the fragments of S = Q K^T and also in those of S^T = K Q^T, so
// threads exchange no words. Groups are numbered without gaps along rows and along columns. These
// two numbers, xored with the other two words, are the counter. Word i / 8 % 2 of the result
// belongs to (i, j), and its half j / 8 % 2. The lower 15 bits of a half are compared with the
// threshold. One addition does so for both halves of a word: the carry of each half enters its
// highest bit. The 15 bits quantize the rate to 2^-15.
//
// Rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4, call a
// generator Crush-resistant that passes SmallCrush, Crush and BigCrush of TestU01. The authors know
// of no statistical flaw of Philox2x32 with six rounds or more (their library Random123, philox.h).
// Seven rounds leave one to spare, and known answers are published for seven.
//
// Collisions: two streams (of other heads, batches or seeds) have elements with the same bits only
// if their keys are equal, one chance in 2^32, and so are the upper bits of both xored words, which
// is one in 2^42 for 4096 queries and keys (2048 counters each way). So a pair of streams has about
// one chance in 2^74, and 2^30 streams (10,000 steps of 32 layers of 4096 heads and batches) one in
// 2^15. Even then the streams do not agree in place: their elements are permuted by the differences
// of the xored words.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

inline constexpr int kDropoutBlock = 16;          // rows, and columns, of a square of 64 groups
inline constexpr uint32_t kDropoutBits = 0x7fff;  // bits of a half word that are compared

// Holds the first three words of Philox4x32-10 of counter (n, b, 0, 0), with the seed as its key.
struct DropoutKeys {
  uint32_t key, row, col;
};

struct PhiloxPair {
  uint32_t word[2];
};

JAX_FLASH_HOST_DEVICE inline PhiloxPair philox2x32_7(uint32_t counter0, uint32_t counter1,
                                                     uint32_t key) {
  constexpr uint32_t kMultiplier = 0xD256D193, kWeyl = 0x9E3779B9;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    const uint64_t product = uint64_t{kMultiplier} * counter0;
    counter0 = static_cast<uint32_t>(product >> 32) ^ key ^ counter1;
    counter1 = static_cast<uint32_t>(product);
    key += kWeyl;
  }
  return {{counter0, counter1}};
}

// Numbers the groups along rows or columns.
JAX_FLASH_HOST_DEVICE inline uint32_t dropout_group(uint32_t index) {
  return index / kDropoutBlock * (kDropoutBlock / 2) + index % (kDropoutBlock / 2);
}

// Returns the bits of one probability.
JAX_FLASH_HOST_DEVICE inline uint32_t dropout_bits(const DropoutKeys& keys, uint32_t i,
                                                   uint32_t j) {
  const PhiloxPair pair =
      philox2x32_7(dropout_group(i) ^ keys.row, dropout_group(j) ^ keys.col, keys.key);
  const uint32_t word = i / 8 % 2 ? pair.word[1] : pair.word[0];
  return word >> (j / 8 % 2 * 16) & kDropoutBits;
}

}  // namespace jax_flash
