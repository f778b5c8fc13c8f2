// Draws dropout's bits for the rows of a tile, as modifiers/philox.h defines them. A vector holds
// eight counters at a time, one in each 64-bit lane.
#pragma once

#include "host/tile.h"
#include "modifiers/philox.h"

namespace jax_flash::host::JAX_FLASH_ISA {

inline constexpr int kCounters = kDropoutBlock / 2;  // counters for the columns of a block
typedef uint64_t Counters __attribute__((vector_size(8 * kCounters)));

// Holds a bit for each of 16 columns, set if it is kept, in two rows that share counters: i and
// i + 8.
struct KeptPair {
  uint64_t bits[2];
};

// Draws the bits of rows i and i + 8 and columns [j, j + 16). i and j are indices of the whole
// call, with i % 16 < 8 and j % 16 = 0.
inline KeptPair keep_block(const Head& head, uint32_t i, uint32_t j) {
  constexpr uint64_t kMultiplier = 0xD256D193, kWord = 0xffffffff;
  constexpr uint32_t kWeyl = 0x9E3779B9;
  constexpr Counters kLane = {0, 1, 2, 3, 4, 5, 6, 7};
  const DropoutKeys& keys = head.dropout_keys;
  Counters c0 = Counters{} + uint64_t{dropout_group(i) ^ keys.row};
  Counters c1 = (kLane + uint64_t{dropout_group(j)}) ^ uint64_t { keys.col };
  uint32_t key = keys.key;
  for (int round = 0; round < 7; ++round) {
    const Counters product = c0 * kMultiplier;
    c0 = product >> 32 ^ c1 ^ uint64_t{key};
    c1 = product & kWord;
    key += kWeyl;
  }
  // Lane g draws four bits, for columns g and g + 8 of row i and then of row i + 8: bits 0, 8, 16
  // and 24 before the shift by g.
  const uint64_t threshold = head.options->dropout_threshold;
  const Counters halves[4] = {c0, c0 >> 16, c1, c1 >> 16};
  Counters bits = {};
  for (int h = 0; h < 4; ++h) {
    bits |= (Counters)((halves[h] & uint64_t{kDropoutBits}) >= threshold) & uint64_t{1} << (8 * h);
  }
  bits <<= kLane;
  uint64_t all = 0;
  for (int g = 0; g < kCounters; ++g) all |= bits[g];
  return {{all & 0xffff, all >> 16}};
}

// Sets bit c of keep[r] if dropout keeps the probability of row r of the tile and column c, for
// rows from row_begin to row_end.
inline void keep_bits(const Head& head, const Tile& tile, uint64_t (&keep)[kBlockQ]) {
  const auto col = static_cast<uint32_t>(tile.kv_begin) + head.dropout_col;
  const int shift = col % kDropoutBlock;
  const int blocks = (shift + tile.cols + kDropoutBlock - 1) / kDropoutBlock;
  const auto first = static_cast<uint32_t>(tile.q_begin) + head.dropout_row;
  for (int r = tile.row_begin; r < tile.row_end; ++r) keep[r] = 0;
  for (int r = tile.row_begin; r < tile.row_end; ++r) {
    const uint32_t i = first + static_cast<uint32_t>(r);
    const bool second = i / kCounters % 2 != 0;
    if (second && r - kCounters >= tile.row_begin) continue;  // done together with row r - 8
    const int partner = second ? r : r + kCounters;
    for (int block = 0; block < blocks; ++block) {
      const auto j =
          col - static_cast<uint32_t>(shift) + static_cast<uint32_t>(block * kDropoutBlock);
      const KeptPair pair = keep_block(head, second ? i - kCounters : i, j);
      const int at = block * kDropoutBlock - shift;
      const auto placed = [&](uint64_t bits) { return at < 0 ? bits >> -at : bits << at; };
      keep[r] |= placed(pair.bits[second]);
      if (!second && partner < tile.row_end) keep[partner] |= placed(pair.bits[1]);
    }
  }
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
