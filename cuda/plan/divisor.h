// Divides integers: on the host, rounded up; and on the device, by a number that the host knows,
// with a multiplication and a shift. Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994, section 4.
#pragma once

#include <cstdint>

namespace jax_flash {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rounds an offset in a workspace up to where its next part may begin. A part may hold any type.
inline int64_t align_part(int64_t bytes) { return ceil_div(bytes, 256) * 256; }

struct Divisor {
  int32_t divisor = 1;
  uint32_t multiplier = 0;
  int32_t shift = 0;

  Divisor() = default;
  explicit Divisor(int32_t number) : divisor(number) {  // above 0
    if (number == 1) return;
    while ((int64_t{2} << shift) < number) ++shift;  // ceil(log2(number)) - 1
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + number - 1) /
                                       static_cast<uint32_t>(number));
  }

#if defined(__CUDACC__)
  // Divides 0 <= dividend < 2^31.
  __device__ __forceinline__ int32_t quotient(int32_t dividend) const {
    return divisor == 1 ? dividend
                        : static_cast<int32_t>(
                              __umulhi(static_cast<uint32_t>(dividend), multiplier) >> shift);
  }
#endif
};

// Divides without a special case for 1, in fewer instructions. The sm_90 backward kernels use
// Divisor: with this one, ptxas 13.0 spills up to 116 bytes more in them.
struct PlainDivisor {
  int32_t divisor = 1;
  uint32_t multiplier = uint32_t{1} << 31;
  int32_t shift = 0;

  PlainDivisor() = default;
  explicit PlainDivisor(int32_t number) : divisor(number) {  // above 0
    while ((int64_t{1} << shift) < number) ++shift;          // ceil(log2(number))
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + number - 1) /
                                       static_cast<uint32_t>(number));
  }

#if defined(__CUDACC__)
  // Divides 0 <= dividend < 2^31.
  __device__ __forceinline__ int32_t quotient(int32_t dividend) const {
    return static_cast<int32_t>(__umulhi(static_cast<uint32_t>(dividend) * 2, multiplier) >> shift);
  }
#endif
};

}  // namespace jax_flash
