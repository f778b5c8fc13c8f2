// Splits a batch index into its coordinates, and finds the batch's offset in each operand.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/divisor.h"

namespace jax_flash {

// Divides batch indices, which are below 2^31, by the axes after the first one.
struct BatchAxes {
  PlainDivisor sizes[kMaxBatchDims - 1];

  explicit BatchAxes(const Shape& shape) {
    for (int axis = 1; axis < shape.num_batch_dims; ++axis) {
      sizes[axis - 1] = PlainDivisor(static_cast<int32_t>(shape.batch_dims[axis]));
    }
  }
};

// Computes batch_offset() of params.h. The divisions are done once for all operands.
struct BatchIndex {
  int64_t coordinate[kMaxBatchDims] = {};

  BatchIndex() = default;
  // `axes`: the coordinates of a batch of at most two axes.
  __device__ __forceinline__ explicit BatchIndex(const int32_t (&axes)[2])
      : coordinate{axes[0], axes[1]} {}
  __device__ __forceinline__ BatchIndex(const Shape& shape, int64_t index) {
#pragma unroll
    for (int axis = kMaxBatchDims - 1; axis > 0; --axis) {
      if (axis >= shape.num_batch_dims) continue;
      coordinate[axis] = index % shape.batch_dims[axis];
      index /= shape.batch_dims[axis];
    }
    coordinate[0] = index;
  }
  // Does the same without branches, in few instructions.
  __device__ __forceinline__ BatchIndex(const BatchAxes& axes, int32_t index) {
#pragma unroll
    for (int axis = kMaxBatchDims - 1; axis > 0; --axis) {
      const PlainDivisor& size = axes.sizes[axis - 1];
      const int32_t rest = size.quotient(index);
      coordinate[axis] = index - rest * size.divisor;
      index = rest;
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
