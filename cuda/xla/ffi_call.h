// Reads the buffers and attributes of a custom call into the structs of params.h, checking every
// shape (Python has checked already; exported programs and other callers have not).
//
// Arguments: query, key, value, [out, lse, dout,] then those of optional_fields() that the
// attribute `operands` names by its bits, in order. Every operand has the same number of leading
// batch axes, each full or 1 (broadcast). Results: out, lse, [lse_low,] workspace, or dquery, dkey,
// dvalue, the gradients of those optional operands that the attribute `gradients` names in the same
// way, workspace. lse_low is a result of the forward pass, and an operand of the backward pass, if
// something is added to the logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "params.h"
#include "plan/float8.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The attribute `options`; the fields are those of spec.py's ffi_attributes().
struct OptionAttributes {
  float scale;
  bool is_causal;
  int32_t window_left;
  int32_t window_right;
  float logits_soft_cap;
  int32_t dropout_threshold;
  float dropout_scale;
  bool deterministic;
  bool high_precision;
  int32_t smem_limit;
  int32_t family;  // CUDA kernel family: 0 the best, 80, 90
};

struct Call {
  Backward params;  // for a forward call, only the members of Forward are set
  Scales scales;    // of a forward call of float8 operands
  int64_t workspace_bytes = 0;
};

// Describes an argument or a result, either of a custom call or of one that is only asked about.
struct Buffer {
  void* data;
  xla::ffi::DataType type;
  std::span<const int64_t> dims;
  int64_t bytes = 0;
};
using Buffers = std::vector<Buffer>;

// Returns the buffers of a custom call; empty if one is not a buffer.
Buffers buffers_of(xla::ffi::RemainingArgs args);
Buffers buffers_of(xla::ffi::RemainingRets results);

Status read_forward(const Buffers& args, const Buffers& results, const OptionAttributes& options,
                    int32_t operands, Call& call);
Status read_backward(const Buffers& args, const Buffers& results, const OptionAttributes& options,
                     int32_t operands, int32_t gradients, Call& call);

}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jax_flash::OptionAttributes,
                                      ::xla::ffi::StructMember<float>("scale"),
                                      ::xla::ffi::StructMember<bool>("is_causal"),
                                      ::xla::ffi::StructMember<int32_t>("window_left"),
                                      ::xla::ffi::StructMember<int32_t>("window_right"),
                                      ::xla::ffi::StructMember<float>("logits_soft_cap"),
                                      ::xla::ffi::StructMember<int32_t>("dropout_threshold"),
                                      ::xla::ffi::StructMember<float>("dropout_scale"),
                                      ::xla::ffi::StructMember<bool>("deterministic"),
                                      ::xla::ffi::StructMember<bool>("high_precision"),
                                      ::xla::ffi::StructMember<int32_t>("smem_limit"),
                                      ::xla::ffi::StructMember<int32_t>("family"));
