// Counts the distinct [T, S] matrices of a mask. Batch entries and heads may share a matrix.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash::sm90 {

struct MaskMatrices {
  int32_t batch[kMaxBatchDims] = {1, 1, 1, 1}, heads = 1;  // the number of matrices along each axis
  int32_t rows = 1;  // of a matrix: T, or 1 if all queries share a row

  MaskMatrices() = default;
  MaskMatrices(const Shape& shape, const Operand& mask)
      : heads(many(mask.head, shape.heads)), rows(many(mask.row, shape.q_len)) {
    for (int axis = 0; axis < shape.num_batch_dims; ++axis) {
      batch[axis] = many(mask.batch[axis], shape.batch_dims[axis]);
    }
  }

  int64_t matrices() const {
    int64_t product = heads;
    for (const int32_t count : batch) product *= count;
    return product;
  }
  // Returns whether so many batch entries and heads share each matrix that a kernel which converts
  // the mask first takes less time than it saves.
  bool shared(const Shape& shape) const { return 4 * matrices() <= shape.batch * shape.heads; }

 private:
  static int32_t many(int64_t stride, int64_t count) {
    return stride == 0 ? 1 : static_cast<int32_t>(count);
  }
};

// Returns whether rows of an operand can be read in vectors of `bytes`.
inline bool has_vectors(const Operand& operand, int element_bytes, int bytes) {
  const auto fits = [&](int64_t elements) { return elements * element_bytes % bytes == 0; };
  bool all = operand.col == 1 && fits(operand.row) && fits(operand.head) &&
             reinterpret_cast<uintptr_t>(operand.data) % bytes == 0;
  for (const int64_t stride : operand.batch) all = all && fits(stride);
  return all;
}
// Returns the same for a mask whose rows consist of whole vectors.
inline bool mask_has_vectors(const Forward& params, int bytes) {
  return has_vectors(params.mask, 1, bytes) && params.shape.kv_len % bytes == 0;
}

}  // namespace jax_flash::sm90
