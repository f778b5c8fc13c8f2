// Converts values to float16 in the sm_90 forward kernel for bfloat16 calls without modifiers, at
// head dims 64 and 128. Two warps convert tiles of V in shared memory, so that P can be float16,
// too, for such a tile.
//
// Half of the squared error of a call's output comes from its own rounding, half from the rounding
// of P, for which float16 has three bits more than bfloat16. A bfloat16 number within float16's
// range is exact in float16. With every second tile converted, the error is less than with running
// maxima that are the rows' greatest logits, as in other kernels, and this takes less time.
// Converting all tiles takes longer, since shared memory is busy (TUNING.md, "P in float16"). The
// kernel that guesses its running maxima (sm90/forward/order_ahead.cuh) converts all the same: a
// row whose greatest P are in unconverted tiles would be less exact than in other kernels.
//
// Otherwise, the first tile of a query tile's keys is not converted. A block in which some value
// cannot be converted redoes its query tiles with P and V in bfloat16 (sm90/forward/redo.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "plan/half_values.h"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/forward/config.cuh"
#include "sm90/forward/redo.cuh"
#include "sm90/ring.cuh"

namespace jax_flash::sm90 {

// At head dim 96 there are three consumers, which would wait for two converting warps: calls would
// take 18% longer. With values of fewer columns than keys have, calls would take 16% longer.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr bool kConvertsValues =
    JAX_FLASH_SM90_CONVERT_VALUES && std::is_same_v<Element, __nv_bfloat16> &&
    kChecksLate<Config, kModifiers> && (Config::kHeadDim == 64 || Config::kHeadDim == 128);
inline constexpr int kConverterWarps = 2, kConverterArrivals = kConverterWarps * kWarpArrivals;

// True if the converting warps have registers for many values at a time.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr bool kConvertsMany = kConvertsValues<Config, Element, kModifiers> &&
                                      Config::kConsumers == 2 && !Config::kScoresAhead;

// log2 of P for a row's greatest logit, if that is the running maximum. float16 has its full
// precision down to 2^-14, and so for logits up to 18 below the greatest one, which may be far
// above all others. If running maxima do not follow the greatest logits, P is not lifted, and
// float16 can hold P of logits up to 11 above the running maximum.
inline constexpr int kPeakLift = 12;
inline constexpr float kPeakLifted = 1 << kPeakLift;

// A bound of a thread's sum over 32 of a query tile's first keys in a row. A smaller sum means P
// below 2^-15, for which float16 is hardly more exact than bfloat16 unless P is multiplied by
// 2^kPeakLift.
inline constexpr float kFarBelow = 0x1p-10f;

// Returns whether the n-th key tile of a query tile, in the order of processing, has its values
// converted. With scores ahead and guessed running maxima, all have: P is then exact whatever the
// maxima are. With two cut tiles these two have not: running maxima rise in them, and far below
// these float16 has fewer bits than bfloat16.
template <typename Config>
__device__ __forceinline__ bool is_converted(int32_t n) {
  if constexpr (Config::kScoresAhead && !Config::kSecondCut) return true;
  return Config::kSecondCut ? n > 0 && n % 2 == 0 : n % 2 != 0;
}

// Passes the stages of V that must be converted from the warp that starts the copies to the
// converting warps, through a ring of as many slots as V has stages. In names, `place` is a stage
// of V.
template <int kPlaces>
struct ValueConversions {
  static constexpr int32_t kEnd = -1;
  int32_t places[kPlaces];
  uint64_t arrived[kPlaces];  // barriers: the tile has arrived

  __device__ __forceinline__ uint32_t barrier(uint32_t n) const {
    return ptx::shared_address(&arrived[n]);
  }
  __device__ __forceinline__ void init() {
    for (int n = 0; n < kPlaces; ++n) ptx::mbarrier_init(barrier(n), 1);
  }
  // Called by the warp that starts copies. Returns the barrier for the copy of a tile to `place`.
  __device__ __forceinline__ uint32_t add(RingState<kPlaces>& turn, int32_t place) {
    places[turn.stage] = place;
    const uint32_t result = barrier(turn.stage);
    turn.advance();
    return result;
  }
  __device__ __forceinline__ void end(RingState<kPlaces>& turn) {
    ptx::mbarrier_arrive(add(turn, kEnd));
  }
  // Called by the converting warps. Returns the next place, or kEnd.
  __device__ __forceinline__ int32_t wait(RingState<kPlaces>& turn) const {
    ptx::mbarrier_wait_asleep(barrier(turn.stage), turn.parity);
    const int32_t place = *const_cast<const volatile int32_t*>(&places[turn.stage]);
    turn.advance();
    return place;
  }
};

// To find values that are too small for float16, only a sample of a tile is examined, a quarter or
// an eighth of the rows, since examining takes as long as converting. Values beyond 2^16 become
// infinite, which the output shows (sm90/forward/redo.cuh).

// Returns whether the greatest magnitude of some column is too small. `pairs` holds these
// magnitudes as bits, two columns in a word. The least magnitude that is not 0 decides: after the
// addition, as signed numbers, 0 is the greatest and 1 the least.
template <int kPairs>
__device__ __forceinline__ bool any_too_small(const uint32_t (&pairs)[kPairs]) {
  constexpr uint32_t kBoth = 0x00010001;
  uint32_t least = 0x7fff * kBoth;
#pragma unroll
  for (uint32_t pair : pairs) least = __vmins2(least, pair + 0x7fff * kBoth);
  const int low = static_cast<int16_t>(least), high = static_cast<int32_t>(least) >> 16;
  return min(low, high) < static_cast<int>(kGreatEnough) - 0x8001;
}

// Converts all tiles that must be converted. Called by kConverterWarps warps; `warp` is the index
// of the calling one.
template <typename Config, int kChunks>
__device__ __forceinline__ void convert_values(ValueConversions<Config::kValueStages>& conversions,
                                               QueryTilesToRedo& to_redo, int warp,
                                               uint32_t first_tile_smem, uint32_t first_full) {
  using Tile = typename Config::ValueTile;
  constexpr int kBytes = kConverterWarps * 32 * 16;        // bytes of all threads' chunks
  constexpr int kStep = kBytes * kChunks / Tile::kPanels;  // bytes of each panel at a time
  static_assert(Tile::kPanelBytes % kStep == 0);
  const int lane = threadIdx.x % 32;
  RingState<Config::kValueStages> turn;
  bool small = false;  // set if some column of some tile was too small
  for (;;) {
    const int32_t place = conversions.wait(turn);
    if (place == conversions.kEnd) break;
    uint32_t at = first_tile_smem + place * Tile::kBytes + (warp * 32 + lane) * 16;
    // A thread's columns are the same in all rows, since these are multiples of 8 apart.
    uint32_t greatest[Tile::kPanels * 4] = {};
#pragma unroll 1
    for (const uint32_t end = at + Tile::kPanelBytes; at < end; at += kStep) {
      uint4 chunks[kChunks];
      const auto address = [&](int i) {  // one row of all panels after the other
        return at + i % Tile::kPanels * Tile::kPanelBytes + i / Tile::kPanels * kBytes;
      };
#pragma unroll
      for (int i = 0; i < kChunks; ++i) chunks[i] = ptx::ld_shared_v4(address(i));
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const auto convert = [&](uint32_t pair, uint32_t& most) {
          if (i < Tile::kPanels) most = __vmaxu2(most, pair & 0x7fff7fff);
          return ptx::cvt_rn_f16x2_bf16x2(pair);
        };
        uint32_t* const most = &greatest[i % Tile::kPanels * 4];
        ptx::st_shared_v4(address(i),
                          uint4{convert(chunks[i].x, most[0]), convert(chunks[i].y, most[1]),
                                convert(chunks[i].z, most[2]), convert(chunks[i].w, most[3])});
      }
    }
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (kWarpArrivals > 1 || lane == 0) ptx::mbarrier_arrive(first_full + place * 8);
    // The check is done here, when no warp waits for it.
    if (__any_sync(0xffffffff, any_too_small(greatest))) {
      // So far each lane has examined only its own rows, which may be too small by chance. Lanes
      // whose row and swizzled chunk differ in the same bits have the same columns.
#pragma unroll
      for (uint32_t& pair : greatest) {
        pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffff, pair, 8 + 1));
        pair = __vmaxu2(pair, __shfl_xor_sync(0xffffffff, pair, 16 + 2));
      }
      small = small || any_too_small(greatest);
    }
  }
  if (__any_sync(0xffffffff, small)) to_redo.add_all();
  to_redo.notify();
}

}  // namespace jax_flash::sm90
