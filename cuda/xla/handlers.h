// Declares the custom call handlers, which xla/bindings.cc hands to Python.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_flash {

extern "C" {
XLA_FFI_Error* kForwardHost(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* kBackwardHost(XLA_FFI_CallFrame* call_frame);
#ifdef JAX_FLASH_WITH_CUDA
XLA_FFI_Error* kForwardCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* kBackwardCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* kQuantizeCuda(XLA_FFI_CallFrame* call_frame);
#endif
}

}  // namespace jax_flash
