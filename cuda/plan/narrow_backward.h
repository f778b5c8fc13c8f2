// Lists the kernels of sm90/backward/narrow.cuh that are compiled for certain modifiers. A call
// with other modifiers takes the kernel for all of them.
//
// choose.cc picks a row for each call, explain() reports its name, and sm90/backward/launch.cuh
// instantiates the kernel from the row. Deterministic calls take none of them, and calls with a
// relative bias neither.
#pragma once

#include <cstdint>

#include "plan/modifiers.h"

namespace jax_flash::sm90 {

// Describes a kernel by the modifiers that it takes. A kernel for a bias takes elements of
// `bias_bytes` bytes that the copy engine can read: float32, or the operands' 16-bit type. With
// `key_mask`, all queries share the mask (sm90/key_mask.cuh).
struct NarrowBackward {
  uint32_t modifiers;
  const char* name;
  int32_t bias_bytes = 0;
  bool key_mask = false;

  constexpr bool takes_several() const { return (modifiers & (modifiers - 1)) != 0; }
  // Kernels for several modifiers exist where models use them: compiling them takes long.
  constexpr bool exists(int32_t head_dim, bool is_bfloat16) const {
    return !takes_several() || (is_bfloat16 && (head_dim == 64 || head_dim == 128));
  }
};

inline constexpr NarrowBackward kNarrowBackward[] = {
    {kSegments, "one kernel, segments"},
    {kSoftCap, "one kernel, soft cap"},
    {kMask, "one kernel, mask of keys", 0, true},
    {kMask, "one kernel, mask"},
    {kBias, "one kernel, bias", 2},
    {kBias, "one kernel, float32 bias", 4},
    {kDropout, "one kernel, dropout"},
    {kDistance, "one kernel, ALiBi"},
    {kSegments | kSoftCap, "one kernel, segments and soft cap"},
    {kSegments | kBias, "one kernel, segments and bias", 2},
    {kSegments | kBias, "one kernel, segments and float32 bias", 4},
    {kSegments | kDistance, "one kernel, segments and ALiBi"},
    {kMask | kSoftCap, "one kernel, mask and soft cap"},
    {kMask | kDropout, "one kernel, mask and dropout"},
};
inline constexpr int kNarrowBackwardCount = sizeof(kNarrowBackward) / sizeof(kNarrowBackward[0]);

}  // namespace jax_flash::sm90
