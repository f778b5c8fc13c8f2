// V of bfloat16 in float16, which a kernel before the sm_90 forward kernels for a bias or a mask
// makes of it, up to head dim 128: P has three bits more then.
//
// Half of the squared error of an output is P's, rounded to bfloat16, unless references are the
// rows' greatest logits, whose P is 1 (TUNING.md, "Errors"). In float16 P is so exact that
// references are of no account, and these kernels need not look for the greatest logits
// (TUNING_modifiers.md, "V in float16"). Without modifiers there are warps to convert V where it
// lies, in each multiprocessor anew (sm90/forward/values.cuh); here are none.
#pragma once

#include <cstdint>

#include "params.h"
#include "plan/mask_matrices.h"

namespace jax_flash::sm90 {

// float16 rounds values below 2^-14 by up to 2^-25, which is to be little beside what a column of
// the output has. So in each column of some rows a value is to reach 2^-12, which makes it 1/8 of
// what P of bfloat16 would do, or all are 0. In the bits of bfloat16:
inline constexpr uint32_t kGreatEnough = 0x3980;

// In the workspace, from a multiple of kAlignment on: for each block of the kernel that makes it
// whether it has seen values that float16 cannot hold, and V: all that is not broadcast, side by
// side.
struct HalfValues {
  static constexpr int64_t kAlignment = 256;
  static constexpr int kMostBlocks = 2048;
  // To read and write V once more takes a part of a call's time that falls with how many rows of
  // queries attend to it. Fewer of them take references that are the greatest logits.
  static constexpr int64_t kLeastRows = 2048;

  // `modifiers`: whether the call has a bias or a mask, and nothing else for which a kernel would
  // be the one for several (launch_modified()).
  static bool takes(const Shape& shape, DType dtype, bool modifiers) {
    const int32_t dim = shape.head_dim > shape.value_dim ? shape.head_dim : shape.value_dim;
    return modifiers && dtype == DType::kBFloat16 && (dim <= 64 || (dim > 96 && dim <= 128)) &&
           shape.q_len * int64_t{shape.heads} >= kLeastRows * shape.kv_heads;
  }

  // `matrices`: the product of V's batch axes and heads that are not broadcast.
  static int64_t bytes(const Shape& shape, int64_t matrices) {
    return kMostBlocks * 4 + matrices * shape.kv_len * shape.value_dim * 2;
  }
  static int64_t align(int64_t offset) {
    return (offset + kAlignment - 1) / kAlignment * kAlignment;
  }
};

// The batch axes and heads of V that differ.
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
