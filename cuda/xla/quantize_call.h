// Reads the buffers and attributes of the custom call "jax_flash_quantize", checking every shape.
//
// Arguments: one to three arrays [sets, batch, T, heads, D] of one dtype. Results: the values of
// each, in its shape, float8_e4m3fn; then the scales of each, float32 [sets, batch, blocks, heads],
// or [sets, 1, 1, 1] if all of a set shares one. Attributes: `block`, how many tokens of a head
// share a scale (all, if the sequence is shorter), 0 where all of a set does; `rotated`, a bit for
// each array that is rotated; `seed`, of the rotation.
#pragma once

#include <cstdint>

#include "quantize/quantize.h"
#include "status.h"
#include "xla/ffi_call.h"

namespace jax_flash {

Status read_quantize(const Buffers& args, const Buffers& results, int64_t block, int32_t rotated,
                     int64_t seed, Quantize& call);

}  // namespace jax_flash
