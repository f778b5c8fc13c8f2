// Reads the buffers and attributes of the custom call "jax_flash_quantize", and checks every shape.
//
//   arguments   one to three arrays [sets, batch, T, heads, D] of one dtype
//   results     for each array, its values in float8_e4m3fn and in its shape; then, for each array,
//               its float32 scales [sets, batch, blocks, heads], or [sets, 1, 1, 1] if a whole set
//               shares a scale
//   attributes  block    the number of tokens of a head that share a scale, or 0 if a whole set
//                        shares one; a shorter sequence is one block
//               rotated  bit i: array number i is rotated
//               seed     of the rotation
#pragma once

#include <cstdint>

#include "quantize/quantize.h"
#include "status.h"
#include "xla/ffi_call.h"

namespace jax_flash {

Status read_quantize(const Buffers& args, const Buffers& results, int64_t block, int32_t rotated,
                     int64_t seed, Quantize& call);

}  // namespace jax_flash
