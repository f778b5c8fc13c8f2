// Decides when a kernel converts bfloat16 V to float16 before the sm_90 forward kernels for a bias
// or a mask, up to head dim 128, and lays out the result. P V is then computed in float16, so P has
// three more bits.
//
// P, rounded to bfloat16, causes half of the squared error of an output, unless the running maximum
// is a row's greatest logit, whose P is 1 (TUNING.md, "Errors"). In float16, P is so exact that the
// choice of the running maximum does not matter, and these kernels need not find the greatest
// logits (TUNING_modifiers.md, "V in float16"). Kernels without modifiers have warps that convert V
// in place, separately in each multiprocessor (sm90/forward/values.cuh). The kernels for a bias or
// a mask have no warps for this.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/mask_matrices.h"

namespace jax_flash::sm90 {

// float16 rounds values below 2^-14 by up to 2^-25, which must be small compared with a column of
// the output. So in each column of some rows, either a value must reach 2^-12, which makes this
// error 1/8 of what P in bfloat16 would cause, or all values must be 0. This is 2^-12 as the bits
// of a bfloat16.
inline constexpr uint32_t kGreatEnough = 0x3980;

// Describes the part of the workspace for V in float16, which starts where align_part() says:
// 4 bytes per block of the converting kernel, which say whether the block has found values that
// float16 cannot hold; then all elements of V that are not broadcast, contiguous.
struct HalfValues {
  static constexpr int kMostBlocks = 2048;
  // The conversion reads and writes V once more. The more query rows attend to V, the smaller is
  // the share of this in a call's time. With fewer rows than this, V is not converted, and running
  // maxima are the greatest logits.
  static constexpr int64_t kLeastRows = 2048;

  // `modifiers`: true if the call has a bias or a mask, and no other modifier: kernels for several
  // modifiers do not read the copy.
  static bool takes(const Shape& shape, DType dtype, bool modifiers) {
    const int32_t dim = shape.head_dim > shape.value_dim ? shape.head_dim : shape.value_dim;
    return modifiers && dtype == DType::kBFloat16 && (dim <= 64 || (dim > 96 && dim <= 128)) &&
           shape.q_len * int64_t{shape.heads} >= kLeastRows * shape.kv_heads;
  }

  // `matrices`: the product of V's batch axes and heads that are not broadcast.
  static int64_t bytes(const Shape& shape, int64_t matrices) {
    return kMostBlocks * 4 + matrices * shape.kv_len * shape.value_dim * 2;
  }
};

// Holds the sizes of the axes along which V is not broadcast; 1 for the others.
struct ValueMatrices {
  int32_t batch[kMaxBatchDims] = {1, 1, 1, 1}, heads = 1;

  ValueMatrices(const Shape& shape, const Operand& value)
      : heads(value.head == 0 ? 1 : shape.kv_heads) {
    for (int axis = 0; axis < shape.num_batch_dims; ++axis) {
      if (value.batch[axis] != 0) batch[axis] = static_cast<int32_t>(shape.batch_dims[axis]);
    }
  }
  int64_t count() const {
    int64_t product = heads;
    for (const int32_t size : batch) product *= size;
    return product;
  }
};

}  // namespace jax_flash::sm90
