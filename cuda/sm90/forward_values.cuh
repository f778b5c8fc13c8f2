// Values in float16 in the sm_90 forward kernel for bfloat16 calls without modifiers, up to head
// dim 128: two warps convert every second tile of V, so that P, too, is float16 for it.
//
// Of the squared error of a call's output, half is its own rounding and half that of P, for which
// float16 has three bits more than bfloat16. A bfloat16 number within float16's range is the same
// in float16. With every second tile the error is less than with references that are the rows'
// greatest logits, as others have them, and less time goes to it. All tiles would take three times
// as much: shared memory is busy as it is (TUNING.md, "P in float16").
//
// The first tile of a query tile's keys is not converted. A block in which some value cannot be
// converted does its query tiles again with P and V of bfloat16 (forward_again.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/config.cuh"
#include "sm90/forward_again.cuh"
#include "sm90/ring.cuh"

namespace jax_flash::sm90 {

template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr bool kConvertsValues =
    JAX_FLASH_SM90_CONVERT_VALUES && std::is_same_v<Element, __nv_bfloat16> &&
    kChecksLate<Config, kModifiers>;
inline constexpr int kConverterWarps = 2, kConverterArrivals = kConverterWarps * kWarpArrivals;

// Whether these have registers for many values at a time.
template <typename Config, typename Element, uint32_t kModifiers>
inline constexpr bool kConvertsMany = kConvertsValues<Config, Element, kModifiers> &&
                                      Config::kConsumers == 2 && !Config::kScoresAhead;

// Where references are the rows' greatest logits, log2 of their P: float16 has its full precision
// down to 2^-14, and so for logits up to 18 below the greatest one, which may be far above all
// others. Else P of logits up to 11 above the reference are numbers of float16.
inline constexpr int kLift = 12;
inline constexpr float kLifted = 1 << kLift;

// Of a thread's sum in a row of a query tile's first keys, 32 of them: less than this is P of below
// 2^-15, of which float16 has little more than bfloat16 unless it is multiplied by 2^kLift.
inline constexpr float kFarBelow = 0x1p-10f;

// Whether the n-th tile of a query tile's keys, in the order in which they are used, is converted.
// None is that an edge cuts with scores ahead, since references rise with it: far below them
// float16 has fewer bits than bfloat16.
template <typename Config>
__device__ __forceinline__ bool is_converted(int32_t n) {
  return Config::kSecondCut ? n > 0 && n % 2 == 0 : n % 2 != 0;
}

// The places of V that are to be converted, in turn, from the warp that starts the copies to those
// that convert them. There are as many as places of V.
template <int kPlaces>
struct ValueConversions {
  static constexpr int32_t kEnd = -1;
  int32_t places[kPlaces];
  uint32_t has_small;         // not 0: of the values so far, some are small
  uint64_t arrived[kPlaces];  // barriers: the tile is there

  __device__ __forceinline__ uint32_t barrier(uint32_t n) const {
    return ptx::shared_address(&arrived[n]);
  }
  __device__ __forceinline__ void init() {
    has_small = 0;
    for (int n = 0; n < kPlaces; ++n) ptx::mbarrier_init(barrier(n), 1);
  }
  // By the warp that starts copies: the barrier for a tile that is copied to `place`.
  __device__ __forceinline__ uint32_t add(RingState<kPlaces>& turn, int32_t place) {
    places[turn.stage] = place;
    const uint32_t result = barrier(turn.stage);
    turn.advance();
    return result;
  }
  __device__ __forceinline__ void end(RingState<kPlaces>& turn) {
    ptx::mbarrier_arrive(add(turn, kEnd));
  }
  // By those that convert them: the next place, or kEnd.
  __device__ __forceinline__ int32_t wait(RingState<kPlaces>& turn) const {
    ptx::mbarrier_wait_asleep(barrier(turn.stage), turn.parity);
    const int32_t place = *const_cast<const volatile int32_t*>(&places[turn.stage]);
    turn.advance();
    return place;
  }
  // By consumers that have waited for the values.
  __device__ __forceinline__ bool too_small() const {
    return *const_cast<const volatile uint32_t*>(&has_small) != 0;
  }
};

// Values below 2^-25 vanish in float16, and what it rounds others by, 2^-25 at most, is to be
// little beside what matters of the output. So something is to reach 2^-10, here in the bits of
// bfloat16, or all is 0: of a sample, since to look costs half as many instructions as to convert.
// Values beyond 2^16 become infinite, which the output shows (forward_again.cuh).
inline constexpr uint32_t kGreatEnough = 0x3a80;

// By kConverterWarps warps, this one the warp-th: all tiles that are to be converted.
template <typename Config, int kChunks>
__device__ __forceinline__ void convert_values(ValueConversions<Config::kValueStages>& conversions,
                                               int warp, uint32_t first_tile_smem,
                                               uint32_t first_full) {
  using Tile = typename Config::ValueTile;
  constexpr int kBytes = kConverterWarps * 32 * 16;  // of all threads' chunks
  static_assert(Tile::kBytes % (kBytes * kChunks) == 0);
  const int lane = threadIdx.x % 32;
  RingState<Config::kValueStages> turn;
  for (;;) {
    const int32_t place = conversions.wait(turn);
    if (place == conversions.kEnd) return;
    const uint32_t tile_smem = first_tile_smem + place * Tile::kBytes;
    __nv_bfloat162 greatest{};
#pragma unroll 1
    for (uint32_t at = tile_smem + (warp * 32 + lane) * 16; at < tile_smem + Tile::kBytes;
         at += kBytes * kChunks) {
      uint4 chunks[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) chunks[i] = ptx::ld_shared_v4(at + i * kBytes);
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const auto convert = [&](uint32_t pair) {
          if (i == 0) {
            greatest = __hmax2(greatest, __habs2(reinterpret_cast<const __nv_bfloat162&>(pair)));
          }
          return ptx::cvt_rn_x2<__half>(__uint_as_float(pair << 16),
                                        __uint_as_float(pair & 0xffff0000));
        };
        ptx::st_shared_v4(at + i * kBytes, uint4{convert(chunks[i].x), convert(chunks[i].y),
                                                 convert(chunks[i].z), convert(chunks[i].w)});
      }
    }
    ptx::fence_proxy_async_shared();
    const uint32_t both = reinterpret_cast<const uint32_t&>(greatest);
    const uint32_t bits = __reduce_max_sync(0xffffffff, max(both & 0xffff, both >> 16));
    if (lane == 0 && bits != 0 && bits < kGreatEnough) conversions.has_small = 1;
    __syncwarp();
    if (kWarpArrivals > 1 || lane == 0) ptx::mbarrier_arrive(first_full + place * 8);
  }
}

}  // namespace jax_flash::sm90
