// Defines the kernels for head dims above 256: tile sizes, warp roles and shared-memory layouts.
// All modifiers run in one kernel; a call without them takes it, too.
#pragma once

#include <cstdint>

#include "tile/smem_tile.cuh"

namespace jax_flash::sm80 {

inline constexpr int kWideDim = 512;

// Configures the forward pass. kRowWarps divide the rows of a query tile. Those that share rows
// divide the keys of a tile for S, and the columns for the output.
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
  // Two warps compute the scores of both, each summing over half of the columns: fewer bytes of
  // operands. Then they hand over half of the sums, for which there is no room in 99 KB.
  static constexpr int kShares = kSmemKb <= 99 ? 1 : 2;
  static constexpr bool kLongestFirst = true;

  using QueryTile = SmemTile<kBlockQ, kHeadDim>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim>;
  using ValueTile = SmemTile<kBlockKv, kValueDim>;
  using OutTile = QueryTile;  // not used
  // Rows of the tile of P have 64 columns: with 32 keys, the second half of the queries is beside
  // the first.
  static constexpr int kHalves = 64 / kBlockKv;
  using ProbabilityTile = SmemTile<kBlockQ / kHalves, 64>;

  // Shared memory holds query, key, value, P; sums of S, float32 in the order of fragments.
  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + KeyTile::kBytes;
  static constexpr int kProbabilityOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kHandoverOffset = kProbabilityOffset + ProbabilityTile::kBytes;
  static constexpr int kHandoverBytes = kShares == 1 ? 0 : kM * kScoreN * 512;  // of a warp
  static constexpr int kSmemBytes = kHandoverOffset + kWarps * kHandoverBytes;
  static constexpr int kStaticSmemBytes = 2048 / kHalves;  // most for row statistics and the like
  static_assert(kSmemBytes + kStaticSmemBytes <= kSmemLimit);
};

// Configures a kernel of the backward pass, which owns a tile of keys and values, and goes through
// those of Q and dO, or the other way round. Half of the warps compute S, the others dP; all of
// them divide the columns of the gradients.
template <bool kOwnsKeys, int kSmemKb>
struct WideBackwardConfig {
  static constexpr int kSmemLimit = kSmemKb * 1024;
  static constexpr int kHeadDim = kWideDim, kValueDim = kWideDim;
  static constexpr int kBlockQ = 32, kBlockKv = 32;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kStages = kSmemKb > 163 ? 2 : 1;  // of the tiles that are not its own
  static constexpr int kKeyStages = kOwnsKeys ? 1 : kStages;
  static constexpr int kQueryStages = kOwnsKeys ? kStages : 1;
  static constexpr int kGradientN = kWideDim / 8 / kWarps;
  static constexpr bool kLongestFirst = true;

  using Tile = SmemTile<32, kWideDim>;
  using ScoreTile = SmemTile<kBlockQ, kBlockKv>;

  // Shared memory holds key, value, query, dO, each as often as it has stages; P, dS; sums of S and
  // dP that warps hand over, float32 in the order of fragments.
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
