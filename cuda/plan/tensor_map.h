// Decides which operands a tensor map of the copy engine can describe. This is plain C++, for the
// choice of a kernel.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

// A map's axes are columns, rows, heads and this many batch axes.
inline constexpr int kTensorMapBatchDims = 2;

// Returns whether a map can describe the operand with this many rows. The strides must be at least
// 0 and below 2^40 bytes, the stride of several rows must not be 0, and the operand may have at
// most as many batch axes as a map.
inline bool fits_tensor_map(const Shape& shape, const Operand& operand, int64_t rows) {
  const auto fits = [](int64_t stride) { return stride >= 0 && stride < int64_t{1} << 38; };
  bool all = shape.num_batch_dims <= kTensorMapBatchDims && fits(operand.row) &&
             (operand.row > 0 || rows <= 1) && fits(operand.head);
  for (int axis = 0; axis < shape.num_batch_dims; ++axis) all = all && fits(operand.batch[axis]);
  return all;
}

}  // namespace jax_flash
