// Rounds arrays of 16 or 32 bits to e4m3 with scales on a GPU: the primitive of
// jax_flash/quantization.py. Its numbers are those of jax_flash/fp8.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "params.h"
#include "plan/divisor.h"
#include "status.h"

namespace jax_flash {

// Describes one array. A scale is the greatest finite magnitude of the elements that share it,
// divided by 448 and rounded up to a power of two.
struct Rounding {
  const void* x = nullptr;    // [sets, batch, T, heads, D]
  uint8_t* values = nullptr;  // x divided by its scale, in the shape of x
  float* scale = nullptr;     // [sets, batch, blocks of T, heads], or [sets]
  int32_t sets = 0, length = 0, heads = 0, head_dim = 0;
  int64_t batch = 0;
  int64_t rotation = -1;  // the seed of a rotation along D; -1: none
};

// Describes a call: up to three arrays of one dtype.
struct Quantize {
  static constexpr int kMost = 3;
  Rounding arrays[kMost];
  int32_t count = 0;
  DType dtype = DType::kBFloat16;
  int64_t block = 0;  // tokens of a head that share a scale; 0: all of a set share one
};

// Enqueues the rounding. Head dims must be multiples of 8, up to 256.
Status launch_quantize(const Quantize& call, cudaStream_t stream);

}  // namespace jax_flash
