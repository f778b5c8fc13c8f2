// Defines vectors of the instruction set that this file is compiled for, in the portable vector
// extensions of GCC and Clang. Arithmetic, comparisons (lanes of 0 and -1) and ?: work lane by
// lane.
#pragma once

#include <cstdint>
#include <utility>

#if !defined(__clang__) && !defined(__GNUC__)
#error "cuda/host needs the vector extensions of GCC or Clang"
#endif

namespace jax_flash::host::JAX_FLASH_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kLanes = kVectorBytes / 4;

// The microkernel holds 6 x kPanelVectors accumulators: in 24 of 32 registers, or in 12 of 16.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kPanelVectors = 4;
#else
inline constexpr int kPanelVectors = 2;
#endif

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef int32_t VecI __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VecU __attribute__((vector_size(kVectorBytes)));
typedef uint16_t VecHalf __attribute__((vector_size(kVectorBytes / 2)));

#define JAX_FLASH_INLINE [[gnu::always_inline]] inline

inline constexpr float kInfinity = __builtin_inff();

JAX_FLASH_INLINE Vec splat(float x) { return x - Vec{}; }

JAX_FLASH_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

JAX_FLASH_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

JAX_FLASH_INLINE VecI bits_of(Vec v) { return (VecI)v; }

// Returns the larger number of each lane. A lane of x that is NaN is ignored.
JAX_FLASH_INLINE Vec max_ignoring_nan(Vec best, Vec x) { return x > best ? x : best; }

// Lane l holds 1 << l.
template <int... kLane>
constexpr VecI lane_bits(std::integer_sequence<int, kLane...>) {
  return VecI{(1 << kLane)...};
}
using LaneIndices = std::make_integer_sequence<int, kLanes>;
inline constexpr VecI kLaneBits = lane_bits(LaneIndices());

// Returns -1 in lanes for which bit (vector * kLanes + lane) is set, and 0 in the others.
JAX_FLASH_INLINE VecI lanes_set(uint64_t bits, int vector) {
  const VecI word = static_cast<int32_t>(bits >> (vector * kLanes)) - VecI{};
  return (word & kLaneBits) != 0;
}

#if defined(__clang__)
#define JAX_FLASH_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JAX_FLASH_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VecI{__VA_ARGS__})
#endif

template <int kBy, int... kLane>
JAX_FLASH_INLINE Vec rotate(Vec v, std::integer_sequence<int, kLane...>) {
  return JAX_FLASH_SHUFFLE(v, v, ((kLane + kBy) % kLanes)...);
}

template <int kBy = kLanes / 2>
JAX_FLASH_INLINE float reduce_max(Vec v) {
  if constexpr (kBy == 0) {
    return v[0];
  } else {
    return reduce_max<kBy / 2>(max_ignoring_nan(v, rotate<kBy>(v, LaneIndices())));
  }
}

template <int kBy = kLanes / 2>
JAX_FLASH_INLINE float reduce_add(Vec v) {
  if constexpr (kBy == 0) {
    return v[0];
  } else {
    return reduce_add<kBy / 2>(v + rotate<kBy>(v, LaneIndices()));
  }
}

// Does one step of the transposition: swaps the lanes of `a` whose index has bit kBy with the lanes
// of `b` whose index does not.
template <int kBy, int... kLane>
JAX_FLASH_INLINE void exchange(Vec& a, Vec& b, std::integer_sequence<int, kLane...>) {
  const Vec low = JAX_FLASH_SHUFFLE(a, b, (kLane & kBy ? kLanes + kLane - kBy : kLane)...);
  b = JAX_FLASH_SHUFFLE(a, b, (kLane & kBy ? kLanes + kLane : kLane + kBy)...);
  a = low;
}

template <int kBy = 1>
JAX_FLASH_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & kBy)) exchange<kBy>(rows[i], rows[i | kBy], LaneIndices());
  }
  if constexpr (2 * kBy < kLanes) transpose<2 * kBy>(rows);
}

template <typename T>
JAX_FLASH_INLINE T min_of(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
JAX_FLASH_INLINE T max_of(T a, T b) {
  return a < b ? b : a;
}

}  // namespace jax_flash::host::JAX_FLASH_ISA
