// Implements Philox4x32-10, the counter-based generator behind dropout (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011, section 4).
//
// The dropout mask is a pure function of the seed and of the global index (b, n, i, j) of a
// probability, so any tiling, device or sharding draws the same bits. One counter (j / 8, i, n, b)
// yields 128 bits, 16 for each of the eight neighbours along j: element j reads the half word j %
// 8, low half first. Sixteen bits quantise the rate to 1/65536 and take a quarter of the generator
// calls that 32 bits would take.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

inline constexpr int kDropoutGroup = 8;  // neighbours along j that share a counter

struct PhiloxWords {
  uint32_t word[4];

  // Returns the 16 bits of element j of the group, 0 <= j < kDropoutGroup.
  JAX_FLASH_HOST_DEVICE uint32_t half(int j) const {
    return word[j >> 1] >> (16 * (j & 1)) & 0xffff;
  }
};

JAX_FLASH_HOST_DEVICE inline PhiloxWords philox4x32_10(PhiloxWords counter, uint32_t key0,
                                                       uint32_t key1) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t* c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kMultiplier0} * c[0];
    const uint64_t product1 = uint64_t{kMultiplier1} * c[2];
    const uint32_t next0 = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ key1;
    c[1] = static_cast<uint32_t>(product1);
    c[3] = static_cast<uint32_t>(product0);
    c[0] = next0;
    c[2] = next2;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// Returns the random words of the group that holds column j; i, n and b are as in the file comment.
JAX_FLASH_HOST_DEVICE inline PhiloxWords dropout_words(uint32_t seed0, uint32_t seed1, uint32_t b,
                                                       uint32_t n, uint32_t i, uint32_t j) {
  return philox4x32_10({{j / kDropoutGroup, i, n, b}}, seed0, seed1);
}

}  // namespace jax_flash
