// Splits a batch index into its coordinates, and finds the batch's offset in each operand.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash {

// Computes batch_offset() of params.h. The divisions are done once for all operands.
struct BatchIndex {
  int64_t coordinate[kMaxBatchDims] = {};

  BatchIndex() = default;
  __device__ __forceinline__ BatchIndex(const Shape& shape, int64_t index) {
#pragma unroll
    for (int axis = kMaxBatchDims - 1; axis > 0; --axis) {
      if (axis >= shape.num_batch_dims) continue;
      coordinate[axis] = index % shape.batch_dims[axis];
      index /= shape.batch_dims[axis];
    }
    coordinate[0] = index;
  }

  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    int64_t sum = 0;
#pragma unroll
    for (int axis = 0; axis < kMaxBatchDims; ++axis) sum += coordinate[axis] * operand.batch[axis];
    return sum;
  }

  template <typename Element>
  __device__ __forceinline__ Element* pointer(const Operand& operand, int64_t head = 0) const {
    return static_cast<Element*>(operand.data) + offset(operand) + head * operand.head;
  }
};

}  // namespace jax_flash
