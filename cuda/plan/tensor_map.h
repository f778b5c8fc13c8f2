// What tensor maps can describe: for the choice of a kernel, which is plain C++.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

// A map's axes are columns, rows, heads and these.
inline constexpr int kTensorMapBatchDims = 2;

// Whether a map can describe the operand of so many rows: strides from 0 to below 2^40 bytes, that
// of rows not 0, and no more batch axes than a map has.
inline bool fits_tensor_map(const Shape& shape, const Operand& operand, int64_t rows) {
  const auto fits = [](int64_t stride) { return stride >= 0 && stride < int64_t{1} << 38; };
  bool all = shape.num_batch_dims <= kTensorMapBatchDims && fits(operand.row) &&
             (operand.row > 0 || rows <= 1) && fits(operand.head);
  for (int axis = 0; axis < shape.num_batch_dims; ++axis) all = all && fits(operand.batch[axis]);
  return all;
}

}  // namespace jax_flash
