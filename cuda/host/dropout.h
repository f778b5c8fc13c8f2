// Dropout's bits for a row of a tile, from the generator that modifiers/philox.h defines:
// here eight counters at a time, one a 64-bit lane.
#pragma once

#include "host/head.h"

namespace jax_flash::host::JAX_FLASH_ISA {

inline constexpr int kCounters = 8;  // of a row of 64 columns
inline constexpr int kGroup = 8;     // columns that share a counter
typedef uint64_t Counters __attribute__((vector_size(8 * kCounters)));

// Bit c says whether probability (i, kv_begin + c) is kept; kv_begin is a multiple of 64.
inline uint64_t keep_bits(const Head& head, int64_t i, int64_t kv_begin) {
  constexpr uint64_t kWord = 0xffffffff;
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  const uint64_t first = (static_cast<uint64_t>(kv_begin) + head.dropout_col) / kGroup;
  Counters c0 = Counters{0, 1, 2, 3, 4, 5, 6, 7} + first;
  Counters c1 = Counters{} + ((static_cast<uint64_t>(i) + head.dropout_row) & kWord);
  Counters c2 = Counters{} + uint64_t{head.dropout_head};
  Counters c3 = Counters{} + uint64_t{head.dropout_batch};
  uint32_t key0 = head.seed[0], key1 = head.seed[1];
  for (int round = 0; round < 10; ++round) {
    const Counters product0 = c0 * kMultiplier0, product1 = c2 * kMultiplier1;
    c0 = product1 >> 32 ^ c1 ^ uint64_t{key0};
    c2 = product0 >> 32 ^ c3 ^ uint64_t{key1};
    c1 = product1 & kWord;
    c3 = product0 & kWord;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  // Half word 2 w + h of a counter decides column 2 w + h of its group.
  const uint64_t threshold = head.options->dropout_threshold;
  const Counters* words[4] = {&c0, &c1, &c2, &c3};
  Counters kept = {};
  for (int w = 0; w < 4; ++w) {
    const Counters low = *words[w] & 0xffff, high = *words[w] >> 16;
    kept |= (Counters)(low >= threshold) & uint64_t{1} << (2 * w);
    kept |= (Counters)(high >= threshold) & uint64_t{2} << (2 * w);
  }
  uint64_t bits = 0;
  for (int g = 0; g < kCounters; ++g) bits |= kept[g] << (kGroup * g);
  return bits;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
