// The Python module jax_flash._native: the one file that sees nanobind.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "host/attention.h"
#include "params.h"
#include "xla/handlers.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "instances.h"
#include "launch.h"
#endif

namespace nb = nanobind;

namespace jax_flash {
namespace {

template <typename Handler>
nb::capsule ffi_capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>);
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// [(target, platform, handler)], to be registered with jax.ffi.
nb::list registrations() {
  nb::list all;
  all.append(nb::make_tuple("jax_flash_forward", "cpu", ffi_capsule(kForwardHost)));
  all.append(nb::make_tuple("jax_flash_backward", "cpu", ffi_capsule(kBackwardHost)));
#ifdef JAX_FLASH_WITH_CUDA
  all.append(nb::make_tuple("jax_flash_forward", "CUDA", ffi_capsule(kForwardCuda)));
  all.append(nb::make_tuple("jax_flash_backward", "CUDA", ffi_capsule(kBackwardCuda)));
#endif
  return all;
}

Shape make_shape(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads, int32_t kv_heads,
                 int32_t head_dim, int32_t value_dim) {
  Shape shape;
  shape.batch_dims[0] = shape.batch = batch;
  shape.q_len = q_len;
  shape.kv_len = kv_len;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim;
  return shape;
}

DType make_dtype(const std::string& name) {
  return name == "float32"    ? DType::kFloat32
         : name == "bfloat16" ? DType::kBFloat16
                              : DType::kFloat16;
}

int64_t host_backward_workspace_bytes(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads,
                                      int32_t kv_heads, int32_t head_dim, int32_t value_dim,
                                      const std::string& dtype) {
  const Shape shape = make_shape(batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim);
  return host::backward_workspace_bytes(shape, make_dtype(dtype));
}

#ifdef JAX_FLASH_WITH_CUDA
int64_t cuda_forward_workspace_bytes(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads,
                                     int32_t kv_heads, int32_t head_dim, int32_t value_dim,
                                     const std::string& dtype, bool segments, bool bias,
                                     bool soft_cap_or_dropout, int64_t mask_matrices,
                                     int32_t mask_rows, int64_t value_matrices) {
  const Shape shape = make_shape(batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim);
  return cuda::forward_workspace_bytes(
      shape, make_dtype(dtype),
      {segments, bias, soft_cap_or_dropout, mask_matrices, mask_rows, value_matrices});
}

int64_t cuda_backward_workspace_bytes(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads,
                                      int32_t head_dim, int32_t value_dim, bool segments,
                                      bool deterministic) {
  const Shape shape = make_shape(batch, q_len, kv_len, heads, 1, head_dim, value_dim);
  return cuda::backward_workspace_bytes(shape, segments, deterministic);
}
#endif

// Whether this build has the CUDA kernels; it has them wherever nvcc could run.
bool has_cuda() {
#ifdef JAX_FLASH_WITH_CUDA
  return true;
#else
  return false;
#endif
}

// [(pass, family, dtype, head_dim)]: the table of CUDA instances in CMakeLists.txt. A head
// dim in between runs on the next larger one.
nb::list cuda_instances() {
  nb::list all;
#ifdef JAX_FLASH_WITH_CUDA
  const auto add = [&all](const char* pass, const auto& table) {
    for (const auto& instance : table) {
      if (instance.general) continue;  // there is one for each plain instance
      const char* dtype = instance.dtype == DType::kFloat32    ? "float32"
                          : instance.dtype == DType::kBFloat16 ? "bfloat16"
                                                               : "float16";
      all.append(nb::make_tuple(pass, instance.family, dtype, instance.head_dim));
    }
  };
  add("forward", cuda::kForwardInstances);
  add("backward", cuda::kBackwardInstances);
#endif
  return all;
}

}  // namespace

NB_MODULE(_native, module) {
  module.def("registrations", &registrations);
  module.def("has_cuda", &has_cuda);
  module.def("cuda_instances", &cuda_instances);
  module.def("instruction_set", &host::instruction_set);
  module.def("host_backward_workspace_bytes", &host_backward_workspace_bytes, nb::arg("batch"),
             nb::arg("q_len"), nb::arg("kv_len"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("dtype"));
#ifdef JAX_FLASH_WITH_CUDA
  module.def("cuda_forward_workspace_bytes", &cuda_forward_workspace_bytes, nb::arg("batch"),
             nb::arg("q_len"), nb::arg("kv_len"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("dtype"), nb::arg("segments"),
             nb::arg("bias"), nb::arg("soft_cap_or_dropout"), nb::arg("mask_matrices"),
             nb::arg("mask_rows"), nb::arg("value_matrices"));
  module.def("cuda_backward_workspace_bytes", &cuda_backward_workspace_bytes, nb::arg("batch"),
             nb::arg("q_len"), nb::arg("kv_len"), nb::arg("heads"), nb::arg("head_dim"),
             nb::arg("value_dim"), nb::arg("segments"), nb::arg("deterministic"));
#endif
}

}  // namespace jax_flash
