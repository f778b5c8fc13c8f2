// Defines the tile sizes, the roles of warps and the shared-memory layouts of the kernels for head
// dims above 256. One kernel takes all modifiers, and calls without them.
#pragma once

#include <cstdint>

#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

inline constexpr int kWideDim = 512;

// Configures the forward pass. The warps form a grid of kRowWarps x kColWarps. kRowWarps groups of
// warps divide the rows of a query tile. The kColWarps warps of a group share rows: they divide the
// keys of a tile for S, and the columns for the output.
template <int kSmemKb>
struct WideForwardConfig {
  static constexpr int kSmemLimit = kSmemKb * 1024;
  static constexpr int kHeadDim = kWideDim, kValueDim = kWideDim;
  static constexpr int kBlockQ = kSmemKb <= 99 ? 32 : 64, kBlockKv = kSmemKb <= 163 ? 32 : 64;
  static constexpr int kWarps = kSmemKb <= 99 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kRowWarps = kSmemKb > 163 ? 2 : kWarps / 2, kColWarps = kWarps / kRowWarps;
  static constexpr int kM = kBlockQ / 16 / kRowWarps;
  static constexpr int kScoreN = kBlockKv / 8 / kColWarps, kOutN = kValueDim / 8 / kColWarps;
  static_assert(kScoreN % 2 == 0 && kColWarps % 2 == 0);
  // With two shares, a pair of warps computes the scores of both of them. Each sums over half of
  // the head dim, so it reads fewer bytes of operands. Each then passes the sums of the other's
  // scores to it through shared memory, for which 99 KB have no room.
  static constexpr int kShares = kSmemKb <= 99 ? 1 : 2;
  static constexpr bool kLongestFirst = true;

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = SmemTile<kBlockKv, kValueDim>;
  using OutTile = QueryTile;  // ForwardTiles names it; the kernel has none
  // A row of the tile of P has 64 columns. With 32 keys per tile, the first 32 columns hold the
  // first half of the queries, and the others the second half.
  static constexpr int kHalves = 64 / kBlockKv;
  using ProbabilityTile = SmemTile<kBlockQ / kHalves, 64>;

  // Shared memory: query | key | value | P | exchanged sums of S, float32 in fragment order
  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + KeyTile::kBytes;
  static constexpr int kProbabilityOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kHandoverOffset = kProbabilityOffset + ProbabilityTile::kBytes;
  static constexpr int kHandoverBytes = kShares == 1 ? 0 : kM * kScoreN * 512;  // per warp
  static constexpr int kSmemBytes = kHandoverOffset + kWarps * kHandoverBytes;
  static constexpr int kStaticSmemBytes = 2048 / kHalves;  // upper bound: row statistics and bits
  static_assert(kSmemBytes + kStaticSmemBytes <= kSmemLimit);
};

// Configures the two kernels of the backward pass. With kOwnsKeys, a block owns a tile of K and V,
// and streams tiles of Q and dO. Otherwise it owns a tile of Q and dO, and streams tiles of K and
// V. Half of the warps compute S and the others dP. All of them divide the columns of the
// gradients.
template <bool kOwnsKeys, int kSmemKb>
struct WideBackwardConfig {
  static constexpr int kSmemLimit = kSmemKb * 1024;
  static constexpr int kHeadDim = kWideDim, kValueDim = kWideDim;
  static constexpr int kBlockQ = 32, kBlockKv = 32;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kStages = kSmemKb > 163 ? 2 : 1;  // of the streamed tiles
  static constexpr int kKeyStages = kOwnsKeys ? 1 : kStages;
  static constexpr int kQueryStages = kOwnsKeys ? kStages : 1;
  static constexpr int kGradientN = kWideDim / 8 / kWarps;
  static constexpr bool kLongestFirst = true;

  using Tile = SmemTile<32, kWideDim>;
  using ScoreTile = SmemTile<kBlockQ, kBlockKv>;

  // Shared memory: kKeyStages key tiles | as many of values | kQueryStages query tiles |
  // as many of dO | P | dS | sums of S and dP that warps exchange, float32 in fragment order
  static constexpr int kValueOffset = kKeyStages * Tile::kBytes;
  static constexpr int kQueryOffset = 2 * kValueOffset;
  static constexpr int kOutOffset = kQueryOffset + kQueryStages * Tile::kBytes;
  static constexpr int kProbabilityOffset = kOutOffset + kQueryStages * Tile::kBytes;
  static constexpr int kScoreOffset = kProbabilityOffset + ScoreTile::kBytes;
  static constexpr int kHandoverOffset = kScoreOffset + ScoreTile::kBytes;
  static constexpr int kSmemBytes = kHandoverOffset + 3 * kBlockQ * kBlockKv * 4;
  static constexpr int kStaticSmemBytes = 1024;
  static_assert(kSmemBytes + kStaticSmemBytes <= kSmemLimit);
};

}  // namespace jax_flash::sm80
