// Applies a mask in the sm_90 forward kernels for a mask, alone or with another modifier
// (pairs.cuh), which read it ahead: as words of bits, or as bytes. mask_words_kernel() makes the
// words from bytes first, once for all batches and heads that share the mask (plan/mask_words.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "params.h"
#include "plan/mask_words.h"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "sm90/forward/allowed_bits.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/late_maximum.cuh"
#include "sm90/forward/modifier.cuh"
#include "sm90/forward/parts.cuh"
#include "sm90/forward/plan.cuh"
#include "sm90/forward/schedule.cuh"
#include "status.h"
#include "tile/band.cuh"
#include "tile/launch.cuh"
#include "tile/matmul.cuh"
#include "tile/softmax.cuh"

namespace jax_flash::sm90 {

// Holds a thread's part of a tile of the mask while it is converted to bits: for each of its two
// rows, the eight columns of every fourth block, one byte each. The four threads of a quad together
// hold the whole rows, and exchange bits.
template <int kN>
struct MaskBytes {
  static constexpr int kVectors = (kN + 3) / 4;
  uint2 bytes[2][kVectors] = {};
  const uint8_t* rows[2];  // addresses where this thread's bytes begin

  // Sets the addresses for a batch and head, whose row 0 and column 0 are at `offset`, and for the
  // warp's rows from row0 on. Rows beyond the last are replaced by the last.
  __device__ __forceinline__ void begin(const Operand& mask, int64_t offset, int32_t row0,
                                        int32_t count) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = min(row0 + fragment_row(0, 2 * half), count - 1);
      rows[half] =
          static_cast<const uint8_t*>(mask.data) + offset + row * mask.row + threadIdx.x % 4 * 8;
    }
  }
  // Columns from `cols`, a multiple of 8, on are not read: their bytes keep their values.
  __device__ __forceinline__ void load(const Operand&, int32_t tile, int32_t cols) {
    const int32_t col0 = tile * (kN * 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int n = 4 * i + threadIdx.x % 4;
        if ((4 * i + 3 < kN || n < kN) && col0 + n * 8 < cols) {
          bytes[half][i] = *reinterpret_cast<const uint2*>(rows[half] + col0 + i * 32);
        }
      }
    }
  }

  // Converts the bytes, each 0 or 1, to bits.
  __device__ __forceinline__ AllowedBits bits() const {
    AllowedBits allowed;
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    // Swaps the bits of the quad's lanes: a transposition of 4x4 pairs in each byte.
    const auto exchange = [](uint32_t word, int distance, int shift, uint32_t kept) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, word, distance);
      return (word & kept) | (__funnelshift_l(other, other, shift) & ~kept);
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word = 0;
#pragma unroll
      for (int i = kVectors - 1; i >= 0; --i) {
        const uint2 vector = bytes[half][i];
        word = __dp4a(vector.x, 0x08040201u, __dp4a(vector.y, 0x80402010u, word << 8));
      }
      word = exchange(word, 1, odd ? 30 : 2, odd ? 0xcccccccc : 0x33333333);
      word = exchange(word, 2, upper ? 28 : 4, upper ? 0xf0f0f0f0 : 0x0f0f0f0f);
      allowed.row[half] = word;
    }
    return allowed;
  }
};

// Loads and converts the mask for any layout, in one step.
template <int kN>
__device__ __forceinline__ AllowedBits mask_bits(const Operand& mask, int64_t offset, int32_t row0,
                                                 int32_t col0, const Extent& extent) {
  const uint8_t* rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row = min(row0 + fragment_row(0, 2 * half), extent.rows - 1);
    rows[half] = static_cast<const uint8_t*>(mask.data) + offset + row * mask.row;
  }
  AllowedBits allowed = {};
#pragma unroll 4
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t col = min(col0 + fragment_col(n, e), extent.cols - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        allowed.row[half] |= (rows[half][col * mask.col] ? 1u : 0u) << (2 * n + e);
      }
    }
  }
  return allowed;
}

// Loads a thread's pair of words of a tile from the mask that words_operand() describes.
struct MaskPair {
  uint32_t first;  // index for the query tile, at the first key tile
  uint2 pair;

  __device__ __forceinline__ void begin(const Operand& words, int64_t offset, int32_t row0,
                                        int32_t count) {
    const int32_t group = min(row0, count - 1) / MaskWords::kRows;
    first = static_cast<uint32_t>(offset + group * words.row) + threadIdx.x % MaskWords::kThreads;
  }
  __device__ __forceinline__ void load(const Operand& words, int32_t tile, int32_t) {
    pair = static_cast<const uint2*>(words.data)[first + tile * MaskWords::kThreads];
  }
  __device__ __forceinline__ AllowedBits bits() const { return {pair.x, pair.y}; }
};

// Describes the mask in the form of `words`. Row, head and batch strides are in pairs of words.
inline Operand words_operand(const MaskWords& words, void* workspace) {
  Operand operand;
  operand.data = workspace;
  const auto stride = [](int32_t count, int64_t pairs) { return count == 1 ? 0 : pairs; };
  operand.row = stride(words.row_groups, int64_t{words.tiles} * MaskWords::kThreads);
  operand.head = stride(words.heads, words.matrix());
  operand.batch[1] = stride(words.batch[1], words.matrix() * words.heads);
  operand.batch[0] = stride(words.batch[0], words.matrix() * words.heads * words.batch[1]);
  return operand;
}

// Narrows the range of a query tile's key tiles to those in which the mask allows some element,
// given MaskWords.
struct MaskTiles {
  const int4* ranges = nullptr;
  int32_t batch[2] = {}, head = 0, row_group = 0, last_group = 0;

  MaskTiles() = default;
  MaskTiles(const MaskWords& words, const int4* made) {
    ranges = made;
    const auto stride = [](int32_t count, int32_t each) { return count == 1 ? 0 : each; };
    row_group = stride(words.row_groups, 1);
    head = stride(words.heads, words.row_groups);
    batch[1] = stride(words.batch[1], words.row_groups * words.heads);
    batch[0] = stride(words.batch[0], words.row_groups * words.heads * words.batch[1]);
    last_group = words.row_groups - 1;
  }

  template <int kBlockQ>
  __device__ __forceinline__ Range narrow(Range range, const QueryTileIndex& q,
                                          int32_t row0) const {
    if (ranges == nullptr) return range;
    const int4* at =
        ranges + q.batch_axes[0] * batch[0] + q.batch_axes[1] * batch[1] + q.head * head;
    Range left = {INT32_MAX, 0};
#pragma unroll
    for (int i = 0; i < kBlockQ / MaskWords::kRows; ++i) {
      const int4 halves = at[min(row0 / MaskWords::kRows + i, last_group) * row_group];
      left = {min(left.first, min(halves.x, halves.z)), max(left.end, max(halves.y, halves.w))};
    }
    return {max(range.first, left.first), min(range.end, left.end)};
  }
};

// Returns whether skipping tiles saves more than it costs: a block waits for the ranges before it
// starts. With few key tiles, blocks must have several query tiles.
inline bool pays_to_skip(const Shape& shape, const MaskWords& words) {
  return words.tiles >= 8 || (words.tiles >= 4 && query_tiles(shape, 128) >= 4 * 132);
}

inline constexpr int kMaskWordsThreads = 4 * MaskWords::kThreads;

// Converts a mask's bytes to words, and finds the range of key tiles with allowed elements. Grid:
// two blocks, each for half of the key tiles, for each of [batch, heads, row groups] of the
// mask.
template <int kBlockKv>
__global__ void __launch_bounds__(kMaskWordsThreads)
    mask_words_kernel(const __grid_constant__ Operand mask, const __grid_constant__ Extent extent,
                      const __grid_constant__ MaskWords words, bool vectors, uint2* pairs,
                      int2* ranges) {
  ptx::griddepcontrol_launch_dependents();
  constexpr int kN = kBlockKv / 8;
  const int32_t index = blockIdx.x / 2, half = blockIdx.x % 2;
  const int32_t group = index % words.row_groups, matrix = index / words.row_groups;
  const int32_t head = matrix % words.heads, batch = matrix / words.heads;
  const int64_t offset = head * mask.head + batch % words.batch[1] * mask.batch[1] +
                         batch / words.batch[1] * mask.batch[0];
  const int thread = threadIdx.x % MaskWords::kThreads;
  const int32_t row0 = group * MaskWords::kRows + thread / 32 * 16;
  const int32_t middle = (words.tiles + 1) / 2, end = half == 0 ? middle : words.tiles;
  uint2* out = pairs + int64_t{index} * words.tiles * MaskWords::kThreads + thread;

  __shared__ int2 range;
  if (threadIdx.x == 0) range = {INT32_MAX, 0};
  int2 found = {INT32_MAX, 0};
  const auto store = [&](int32_t tile, const AllowedBits& allowed) {
    out[int64_t{tile} * MaskWords::kThreads] = {allowed.row[0], allowed.row[1]};
    if (__any_sync(0xffffffff, (allowed.row[0] | allowed.row[1]) != 0)) {
      found = {min(found.x, tile), tile + 1};
    }
  };
  constexpr int kStep = kMaskWordsThreads / MaskWords::kThreads;
  int32_t tile = (half == 0 ? 0 : middle) + threadIdx.x / MaskWords::kThreads;
  if (vectors) {
    MaskBytes<kN> bytes;
    bytes.begin(mask, offset, row0, extent.rows);
    if (tile < end) bytes.load(mask, tile, extent.cols);
    for (; tile < end; tile += kStep) {
      const AllowedBits allowed = bytes.bits();
      if (tile + kStep < end) bytes.load(mask, tile + kStep, extent.cols);
      store(tile, allowed);
    }
  } else {
    for (; tile < end; tile += kStep) {
      store(tile, mask_bits<kN>(mask, offset, row0, tile * kBlockKv, extent));
    }
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    atomicMin(&range.x, found.x);
    atomicMax(&range.y, found.y);
  }
  __syncthreads();
  if (threadIdx.x == 0) ranges[blockIdx.x] = range;
}

// Launches the kernel that makes the words, and replaces the bytes in `params` by them.
template <int kBlockKv>
Status launch_mask_words(Forward& params, MaskTiles& tiles, cudaStream_t stream) {
  const MaskWords words(params.shape, params.mask, kBlockKv);
  const Extent extent = {params.shape.q_len, params.shape.kv_len};
  void* ranges = static_cast<uint8_t*>(params.workspace) + words.ranges_offset();
  const Status status =
      launch_kernel("sm90::mask_words_kernel", params.shape, mask_words_kernel<kBlockKv>,
                    2 * words.matrices() * words.row_groups, kMaskWordsThreads, 0, stream,
                    params.mask, extent, words, mask_has_vectors(params, 8),
                    static_cast<uint2*>(params.workspace), static_cast<int2*>(ranges));
  if (pays_to_skip(params.shape, words)) tiles = MaskTiles(words, static_cast<const int4*>(ranges));
  params.mask = words_operand(words, params.workspace);
  return status;
}

// Forbids elements that a mask does not allow.
template <typename Config, typename Element, uint32_t kModifiers>
struct MaskModifier : ModifierDefaults<Config, Element, kModifiers> {
  using Base = ModifierDefaults<Config, Element, kModifiers>;
  using Base::kN;
  using typename Base::Scores;
  static constexpr When kOptimistic = When::kWithHalfValues, kExactMaxima = When::kUnlessOptimistic;
  // True where that is faster.
  static constexpr bool kComparesBits = !(Config::kHeadDim == 64 && Config::kConsumers == 3);
  static constexpr bool kReadsQueryAgain = true, kMasks = true, kBits = true, kWaitsAhead = true,
                        kJudges = true;
  static constexpr bool kAddsInfinity = Config::kMaskWords;
  // The number of blocks whose elements are forbidden together, chosen by measurement.
  static constexpr int kForbidBlocks =
      Config::kMaskWords && Config::kHeadDim != 128 ? 4 : Config::kHeadDim / 64;

  const Forward& params;
  const ForwardPlan& plan;
  uint32_t unused[2];  // keeps the next member at the offset at which it was tuned
  // The bits for the tile after the next one.
  std::conditional_t<Config::kMaskWords, MaskPair, MaskBytes<kN>> mask;
  AllowedBits allowed, next_allowed;
  bool all_allowed, next_all_allowed;

  __device__ __forceinline__ MaskModifier(const Forward& forward, const ForwardPlan& planned,
                                          const ForwardSmem<Config>&, int)
      : params(forward), plan(planned) {
    if constexpr (Config::kMaskWords) ptx::griddepcontrol_wait();
  }

  __device__ __forceinline__ void begin(const QueryWork& work, int32_t row0) {
    mask.begin(params.mask, work.modifiers.mask, row0, plan.q_len);
  }
  // Reads without branches; the tile must exist.
  __device__ __forceinline__ void read_ahead(const QueryWork&, int32_t tile) {
    mask.load(params.mask, tile, plan.kv_len);
  }
  __device__ __forceinline__ void look_ahead(const QueryWork& work, int32_t behind) {
    next_allowed = mask.bits();
    next_all_allowed = all_of(next_allowed);
    read_ahead(work, min(behind, work.end - 1));
  }
  __device__ __forceinline__ void prepare(const QueryWork& work, int32_t row0, int32_t tile,
                                          bool edge) {
    const Band& band = work.band;
    allowed = next_allowed;
    all_allowed = next_all_allowed;
    if (edge) {
      forbid_edges(allowed, band, row0, tile * Config::kBlockKv);
      // A warp none of whose rows exist gets all keys: otherwise it would never have running
      // maxima, and would search V in each tile (clear_unattended()).
      if (row0 >= band.q_len) allowed.row[0] = allowed.row[1] = kAllBits<kN>;
      all_allowed = all_of(allowed);
    }
  }
  static __device__ __forceinline__ bool all_of(const AllowedBits& bits) {
    return __all_sync(0xffffffff, (bits.row[0] & bits.row[1]) == kAllBits<kN>);
  }

  __device__ __forceinline__ void forbid_all(Scores& scores) const {
#pragma unroll
    for (int n = 0; n < kN; n += kForbidBlocks) forbid<kForbidBlocks>(scores[0], allowed, n);
  }
  template <bool kAssumes>
  __device__ __forceinline__ void judge(const Scores&, bool, bool careful, bool& whole, bool&,
                                        bool&) const {
    whole = careful;
  }
  template <int kLift = 0, typename Overlapped>
  __device__ __forceinline__ bool exponentials(Scores& scores, OnlineSoftmax<1>& softmax,
                                               float to_log2, bool, Overlapped overlapped) {
    float shift[2];
    find_shift<true, kLift>(softmax, to_log2, shift);
    const auto all = [&](auto all_are_allowed) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (n == kN / 4) overlapped(all_are_allowed());
        if (!all_are_allowed() && n % kForbidBlocks == 0) {
          if constexpr (kAddsInfinity) {
            forbid_finite<kForbidBlocks>(scores[0], allowed, n);
          } else {
            forbid<kForbidBlocks>(scores[0], allowed, n);
          }
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[0][n][e];
          score = ptx::ex2_approx_ftz(fmaf(score, to_log2, -shift[e / 2]));
          softmax.sum[0][e / 2] += score;
        }
      }
    };
    if (all_allowed) {
      all(std::true_type{});
    } else {
      all(std::false_type{});
    }
    return false;
  }
};

template <typename Config, typename Element>
struct ForwardModifier<Config, Element, kMask> : MaskModifier<Config, Element, kMask> {
  using MaskModifier<Config, Element, kMask>::MaskModifier;
};

}  // namespace jax_flash::sm90
