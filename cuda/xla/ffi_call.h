// Reads the buffers and attributes of a custom call into the structs of params.h. Every shape is
// checked: Python checks its own calls, but exported programs and other callers may not.
//
//            arguments                     results
//   forward  query, key, value, optional   out, lse, [lse_low,] workspace
//   backward query, key, value, out, lse,  dquery, dkey, dvalue, gradients of optional operands,
//            dout, optional                workspace
//
// Bit i of the attribute `operands` says whether the optional operand in slot i is present. Slots
// are those of operands.py: first the operands of optional_fields(), then the scales of float8
// operands. Bits of the attribute `gradients` name, in the same way, the optional operands whose
// gradients are results. Every operand has the same number of leading batch axes, each of full size
// or 1 (broadcast). If something is added to the logits, lse_low is a result of the forward pass
// and an optional operand of the backward pass.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "params.h"
#include "plan/float8.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

// The attribute `options`. Its fields are those of ffi_attributes() in spec.py: the members of
// Options in their order, then the others.
struct OptionAttributes {
  Options options;
  int32_t family = 0;  // of CUDA kernels: 80, 90, or 0 for the best
};

struct Call {
  Backward params;  // for a forward call, only the members of Forward are set
  Scales scales;    // of a forward call of float8 operands
  int64_t workspace_bytes = 0;
};

// Describes an argument or a result of a custom call, or of an abstract call that explain() asks
// about.
struct Buffer {
  void* data;
  xla::ffi::DataType type;
  std::span<const int64_t> dims;
  int64_t bytes = 0;
};
using Buffers = std::vector<Buffer>;

// Return the buffers of a custom call, or none if an argument or result is not a buffer.
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
