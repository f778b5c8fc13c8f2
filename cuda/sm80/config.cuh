// Defines the tile sizes, the division of work among warps and the shared-memory layouts of the
// sm_80 family. wide_config.cuh does so for head dims above 256.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tile/element.cuh"
#include "tile/smem_tile.cuh"

// `python benchmarks/run.py ablation` overrides these switches with -D to build variants; the
// defaults are shipped. flash_benchmark/switches.py lists the values that it tries.
#ifndef JAX_FLASH_SM80_FORWARD_BLOCK_Q
#define JAX_FLASH_SM80_FORWARD_BLOCK_Q 128
#endif
#ifndef JAX_FLASH_SM80_FORWARD_BLOCK_KV
#define JAX_FLASH_SM80_FORWARD_BLOCK_KV (kHeadDim <= 192 || (kSmemKb > 99 && !kGeneral) ? 64 : 32)
#endif
#ifndef JAX_FLASH_SM80_FORWARD_WARPS
#define JAX_FLASH_SM80_FORWARD_WARPS (kHeadDim <= (kGeneral ? 64 : 128) ? 4 : 8)
#endif
#ifndef JAX_FLASH_SM80_FORWARD_QUERY_IN_REGISTERS
#define JAX_FLASH_SM80_FORWARD_QUERY_IN_REGISTERS (kHeadDim <= 64 && !kGeneral)
#endif
#ifndef JAX_FLASH_SM80_FORWARD_STAGES
#define JAX_FLASH_SM80_FORWARD_STAGES (kHeadDim <= 64 ? 2 : 1)
#endif
#ifndef JAX_FLASH_SM80_FORWARD_INTERLEAVED
#define JAX_FLASH_SM80_FORWARD_INTERLEAVED (kHeadDim <= 64)
#endif
#ifndef JAX_FLASH_SM80_FORWARD_LONGEST_FIRST
#define JAX_FLASH_SM80_FORWARD_LONGEST_FIRST 1
#endif
#ifndef JAX_FLASH_SM80_BACKWARD_STAGES
#define JAX_FLASH_SM80_BACKWARD_STAGES (kHeadDim <= kTwoStages ? 2 : 1)
#endif
#ifndef JAX_FLASH_SM80_BACKWARD_BLOCK_KV
#define JAX_FLASH_SM80_BACKWARD_BLOCK_KV \
  (kWide && !kSmall ? 128 : kHeadDim > 192 && kSmall ? 32 : 64)
#endif
#ifndef JAX_FLASH_SM80_BACKWARD_MIN_BLOCKS
#define JAX_FLASH_SM80_BACKWARD_MIN_BLOCKS (kHeadDim > 64 ? 1 : kGeneral ? 2 : 3)
#endif

namespace jax_flash::sm80 {

// Configurations exist for up to three sizes of the shared memory that a block may use (kSmemKb):
//   99 KB on sm_86, sm_89 and sm_120; 163 KB on sm_80 and sm_87; 227 KB on sm_90 and sm_100

// Sizes of the forward pass for float32 operands. A product of TF32 takes as long per byte of its
// operands as one of 16-bit types, so tiles have as many bytes as theirs. A warp has 16 rows if
// products are split, since each loaded fragment then serves three products, and if there are few
// blocks.
template <bool kSplit, int kHeadDim, bool kGeneral, int kSmemKb, bool kFewRows>
struct Float32ForwardSizes {
  static constexpr bool kHalf = kHeadDim <= 128 && (kSplit || kFewRows);
  static constexpr int kBlockQ = kHalf ? 64 : kHeadDim <= 128 || kSmemKb > 99 ? 128 : 64;
  static constexpr int kBlockKv = kHeadDim <= 64 ? 64 : kHeadDim <= 128 || kSmemKb > 163 ? 32 : 16;
  static constexpr int kWarps = kHalf || kHeadDim <= 128 || kSmemKb <= 99 ? 4 : 8;
  static constexpr int kStages = kHeadDim <= 64 ? 2 : 1;
  static constexpr int kMinBlocks = kWarps == 8 ? 1 : kHalf && kHeadDim == 128 && !kGeneral ? 3 : 2;
};

// Configures the forward pass: a block computes kBlockQ rows of one head's output and walks over
// tiles of kBlockKv keys and values. A warp owns kMTiles * 16 rows. Their softmax needs no other
// warp, and each fragment of K and V that the warp reads serves all of them.
template <int kHeadDimension, int kValueDimension, bool kGeneral, int kSmemKb,
          int kTf32Products = 0, bool kFewRows = false>
struct ForwardConfig {
  static constexpr bool kFloat32 = kTf32Products > 0;
  using Float32 =
      Float32ForwardSizes<(kTf32Products == 3), kHeadDimension, kGeneral, kSmemKb, kFewRows>;
  static constexpr int kSmemLimit = kSmemKb * 1024;
  static constexpr int kHeadDim = kHeadDimension, kValueDim = kValueDimension;
  static_assert(kHeadDim % 16 == 0 && kValueDim % 16 == 0 && kValueDim <= kHeadDim);

  static constexpr int kBlockQ = kFloat32 ? Float32::kBlockQ : JAX_FLASH_SM80_FORWARD_BLOCK_Q;
  static constexpr int kBlockKv = kFloat32 ? Float32::kBlockKv : JAX_FLASH_SM80_FORWARD_BLOCK_KV;
  static constexpr int kWarps = kFloat32 ? Float32::kWarps : JAX_FLASH_SM80_FORWARD_WARPS;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMTiles = kBlockQ / (16 * kWarps);
  static constexpr bool kQueryInRegisters = !kFloat32 && JAX_FLASH_SM80_FORWARD_QUERY_IN_REGISTERS;
  static constexpr int kStages =  // for each of K and V
      kFloat32 ? Float32::kStages : JAX_FLASH_SM80_FORWARD_STAGES;
  static constexpr int kMinBlocks = kFloat32 ? Float32::kMinBlocks : kWarps == 4 ? 2 : 1;
  static constexpr bool kRoundsTiles = true;  // tiles are rounded if products are in TF32
  // If true, the exponentials of 16 columns are computed right before the products that use them,
  // overlapped with the previous products. If false, all exponentials of a tile are computed before
  // the first of these products. See TUNING.md.
  static constexpr bool kInterleaved = JAX_FLASH_SM80_FORWARD_INTERLEAVED;
  // If true, the last query tiles, which have the most work under a causal mask, go first.
  static constexpr bool kLongestFirst = JAX_FLASH_SM80_FORWARD_LONGEST_FIRST;

  static constexpr int kBytes = kFloat32 ? 4 : 2;
  using QueryTile = SmemTile<kBlockQ, kHeadDim, kBytes>;
  using KeyTile = SmemTile<kBlockKv, kHeadDim, kBytes>;
  using ValueTile = SmemTile<kBlockKv, kValueDim, kBytes>;
  using OutTile = SmemTile<kBlockQ, kValueDim, kBytes>;  // reuses the memory of the query tile

  // Shared memory: query, later out | kStages key tiles | kStages tiles of values
  static constexpr int kKeyOffset = QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * KeyTile::kBytes;
  static constexpr int kSmemBytes = kValueOffset + kStages * ValueTile::kBytes;
  static_assert(kSmemBytes <= kSmemLimit);
};

// Sizes of the backward pass for float32 operands. The names are those of BackwardConfig.
template <bool kSplit, int kHeadDim, int kSmemKb>
struct Float32BackwardSizes {
  static constexpr bool kSmall = kSmemKb <= 99;
  static constexpr int kBlockQ = kHeadDim <= (kSmall ? 64 : 128) ? 64 : 32;
  static constexpr int kBlockKv = kHeadDim <= (kSmall ? 64 : kSmemKb <= 163 ? 128 : 256) ? 64 : 32;
  static constexpr int kStages = kHeadDim <= 32 ? 2 : 1;
  static constexpr bool kManyWarps = kHeadDim > 64 || (kSplit && kHeadDim == 64 && !kSmall);
  static constexpr int kWarps = kManyWarps && kBlockKv == 64 ? 8 : 4;
  static constexpr int kMinBlocks = kHeadDim <= 64 && !kSmall ? 2 : 1;
  static constexpr int kScoreWarpRows = kBlockQ == 64 && kWarps == 8 ? 4 : 2;
  static constexpr int kKeyWarpRows = kBlockKv / 32, kQueryWarpRows = kBlockQ / 32;
};

// Configures the backward pass: a block owns kBlockKv keys and values of one key/value head and
// walks over tiles of kBlockQ rows of the group's query heads. Reads from shared memory bound this
// kernel, so each operand fragment should serve several products. The warps therefore form a
// different grid, rows x columns of the result, for each kind of product:
//   S, dP  [kBlockQ, kBlockKv]     kScoreWarpRows x the rest
//   dK, dV [kBlockKv, head dim]    kKeyWarpRows x the rest
//   dQ     [kBlockQ, head dim]     kQueryWarpRows x the rest
template <int kHeadDimension, int kValueDimension, bool kGeneral, int kSmemKb,
          int kTf32Products = 0>
struct BackwardConfig {
  static constexpr bool kFloat32 = kTf32Products > 0;
  using Float32 = Float32BackwardSizes<(kTf32Products == 3), kHeadDimension, kSmemKb>;
  static constexpr int kSmemLimit = kSmemKb * 1024;
  static constexpr int kHeadDim = kHeadDimension, kValueDim = kValueDimension;
  static_assert(kHeadDim % 32 == 0 && kValueDim % 32 == 0 && kValueDim <= kHeadDim);
  static constexpr bool kSmall = kSmemKb <= 99;

  static constexpr int kBlockQ = kFloat32 ? Float32::kBlockQ : kSmall && kHeadDim >= 192 ? 32 : 64;
  static constexpr bool kWide = kHeadDim == 128 || (kHeadDim == 96 && !kGeneral);
  static constexpr int kBlockKv = kFloat32 ? Float32::kBlockKv : JAX_FLASH_SM80_BACKWARD_BLOCK_KV;
  // The greatest head dim with two stages of Q and dO. Larger head dims have one stage.
  static constexpr int kTwoStages = kSmall ? 64 : kSmemKb > 163 && !kGeneral ? 256 : 192;
  static constexpr int kStages = kFloat32 ? Float32::kStages : JAX_FLASH_SM80_BACKWARD_STAGES;
  static constexpr int kWarps = kFloat32                           ? Float32::kWarps
                                : kHeadDim <= 64 || kBlockKv == 32 ? 4
                                                                   : 8;
  static constexpr int kThreads = 32 * kWarps;
  // Three blocks of four warps leave 168 registers per thread, which suffice without modifiers.
  static constexpr int kMinBlocks =
      kFloat32 ? Float32::kMinBlocks : JAX_FLASH_SM80_BACKWARD_MIN_BLOCKS;

  static constexpr int kScoreWarpRows = kFloat32 ? Float32::kScoreWarpRows
                                        : kBlockQ == 64 && kBlockKv == 64 && kWarps == 8 ? 4
                                                                                         : 2;
  static constexpr int kKeyWarpRows = kFloat32                            ? Float32::kKeyWarpRows
                                      : kBlockKv == 128 || kHeadDim == 96 ? 4
                                                                          : kBlockKv / 32;
  static constexpr int kQueryWarpRows = kFloat32         ? Float32::kQueryWarpRows
                                        : kHeadDim == 96 ? 4
                                        : kBlockKv == 32 ? 1
                                                         : 2;

  static constexpr int kBytes = kFloat32 ? 4 : 2;
  using QueryTile = SmemTile<kBlockQ, kHeadDim, kBytes>;
  using OutTile = SmemTile<kBlockQ, kValueDim, kBytes>;  // for dO
  using KeyTile = SmemTile<kBlockKv, kHeadDim, kBytes>;
  using ValueTile = SmemTile<kBlockKv, kValueDim, kBytes>;
  using ScoreTile = SmemTile<kBlockQ, kBlockKv, kBytes>;

  // Shared memory: key, later dK | value, later dV | P | dS | kStages query tiles | kStages
  // tiles of dO
  static constexpr int kValueOffset = KeyTile::kBytes;
  static constexpr int kProbabilityOffset = kValueOffset + ValueTile::kBytes;
  static constexpr int kScoreOffset = kProbabilityOffset + ScoreTile::kBytes;
  static constexpr int kQueryOffset = kScoreOffset + ScoreTile::kBytes;
  static constexpr int kOutOffset = kQueryOffset + kStages * QueryTile::kBytes;
  static constexpr int kSmemBytes = kOutOffset + kStages * OutTile::kBytes;
  static constexpr int kStaticSmemBytes = 2048;  // upper bound: lse, delta and pointers
  static_assert(kSmemBytes + kStaticSmemBytes <= kSmemLimit);
};

}  // namespace jax_flash::sm80
