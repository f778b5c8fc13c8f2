// Defines the Python module jax_flash._native.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "host/attention.h"
#include "params.h"
#include "xla/ffi_call.h"
#include "xla/handlers.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "instances.h"
#include "launch.h"
#include "plan/recipes.h"
#endif

namespace nb = nanobind;

namespace jax_flash {
namespace {

template <typename Handler>
nb::capsule ffi_capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>);
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Returns [(target, platform, handler)], to be registered with jax.ffi.
nb::list registrations() {
  nb::list all;
  all.append(nb::make_tuple("jax_flash_forward", "cpu", ffi_capsule(kForwardHost)));
  all.append(nb::make_tuple("jax_flash_backward", "cpu", ffi_capsule(kBackwardHost)));
#ifdef JAX_FLASH_WITH_CUDA
  all.append(nb::make_tuple("jax_flash_forward", "CUDA", ffi_capsule(kForwardCuda)));
  all.append(nb::make_tuple("jax_flash_backward", "CUDA", ffi_capsule(kBackwardCuda)));
  all.append(nb::make_tuple("jax_flash_quantize", "CUDA", ffi_capsule(kQuantizeCuda)));
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

int64_t host_backward_workspace_bytes(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads,
                                      int32_t kv_heads, int32_t head_dim, int32_t value_dim,
                                      int64_t distance_floats) {
  const Shape shape = make_shape(batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim);
  return host::backward_workspace_bytes(shape, distance_floats);
}

#ifdef JAX_FLASH_WITH_CUDA
constexpr std::pair<const char*, DType> kDTypes[] = {{"float32", DType::kFloat32},
                                                     {"bfloat16", DType::kBFloat16},
                                                     {"float16", DType::kFloat16},
                                                     {"float8_e4m3fn", DType::kFloat8}};

DType make_dtype(const std::string& name) {
  for (const auto& [known, dtype] : kDTypes) {
    if (name == known) return dtype;
  }
  throw std::invalid_argument("no kernel takes operands of " + name);
}

const char* name_of(DType dtype) {
  const auto is_it = [&](const auto& pair) { return pair.second == dtype; };
  return std::find_if(std::begin(kDTypes), std::end(kDTypes), is_it)->first;
}

int64_t cuda_forward_workspace_bytes(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads,
                                     int32_t kv_heads, int32_t head_dim, int32_t value_dim,
                                     const std::string& dtype, bool segments, bool bias,
                                     bool soft_cap_or_dropout, int64_t mask_matrices,
                                     int32_t mask_rows, int64_t value_matrices, bool exact) {
  const Shape shape = make_shape(batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim);
  return forward_workspace_bytes(
      shape, make_dtype(dtype),
      {segments, bias, soft_cap_or_dropout, mask_matrices, mask_rows, value_matrices, exact});
}

int64_t cuda_backward_workspace_bytes(int64_t batch, int32_t q_len, int32_t kv_len, int32_t heads,
                                      int32_t kv_heads, int32_t head_dim, int32_t value_dim,
                                      const std::string& dtype, bool segments, bool deterministic,
                                      bool distances, bool banded, int64_t mask_matrices,
                                      int32_t mask_rows, bool exact) {
  const Shape shape = make_shape(batch, q_len, kv_len, heads, kv_heads, head_dim, value_dim);
  const bool is_float32 = make_dtype(dtype) == DType::kFloat32;
  return backward_workspace_bytes(shape, {segments, deterministic, distances, banded, mask_matrices,
                                          mask_rows, is_float32, exact});
}

// Describes the arrays of an abstract call by (name of the dtype, dimensions). The choice of a
// kernel depends on alignment, so their data pointer is as aligned as XLA's buffers.
class AbstractBuffers {
 public:
  explicit AbstractBuffers(const nb::list& arrays) {
    for (const nb::handle array : arrays) {
      const auto pair = nb::cast<nb::tuple>(array);
      dims_.push_back(nb::cast<std::vector<int64_t>>(pair[1]));
      buffers_.push_back({data_, element_type(nb::cast<std::string>(pair[0])), {}});
    }
    for (size_t i = 0; i < dims_.size(); ++i) buffers_[i].dims = dims_[i];
  }
  const Buffers& get() const { return buffers_; }

 private:
  static xla::ffi::DataType element_type(const std::string& name) {
    using xla::ffi::DataType;
    const std::pair<const char*, DataType> types[] = {{"float32", DataType::F32},
                                                      {"bfloat16", DataType::BF16},
                                                      {"float16", DataType::F16},
                                                      {"bool", DataType::PRED},
                                                      {"int32", DataType::S32},
                                                      {"uint32", DataType::U32},
                                                      {"float8_e4m3fn", DataType::F8E4M3FN}};
    for (const auto& [known, type] : types) {
      if (name == known) return type;
    }
    return DataType::U8;
  }

  alignas(256) static inline char data_[256];
  std::vector<std::vector<int64_t>> dims_;
  Buffers buffers_;
};

OptionAttributes make_attributes(const nb::dict& values) {
  const auto get = [&](const char* name, auto& where) {
    where = nb::cast<std::remove_cvref_t<decltype(where)>>(values[name]);
  };
  OptionAttributes attributes;
  Options& options = attributes.options;
  get("scale", options.scale);
  get("is_causal", options.is_causal);
  get("window_left", options.window_left);
  get("window_right", options.window_right);
  get("logits_soft_cap", options.logits_soft_cap);
  get("dropout_threshold", options.dropout_threshold);
  get("dropout_scale", options.dropout_scale);
  get("deterministic", options.deterministic);
  get("high_precision", options.high_precision);
  get("smem_limit", options.smem_limit);
  get("family", attributes.family);
  return attributes;
}

// Returns (family, name, queries and keys of a tile, reason) of the kernel that a call gets on a
// device. Raises ValueError if no kernel takes it.
nb::tuple cuda_kernel(bool is_backward, const nb::list& arguments, const nb::list& results,
                      const nb::dict& options, int32_t operands, int32_t gradients,
                      int32_t capability, int32_t multiprocessors, int32_t smem_bytes) {
  const AbstractBuffers args(arguments), rets(results);
  const OptionAttributes attributes = make_attributes(options);
  const Device device = {capability, multiprocessors, smem_bytes};
  Call call;
  Choice choice;
  Status status = is_backward
                      ? read_backward(args.get(), rets.get(), attributes, operands, gradients, call)
                      : read_forward(args.get(), rets.get(), attributes, operands, call);
  if (status.ok()) {
    const Backward& params = call.params;
    status = is_backward ? cuda::choose(params, attributes.family, device, choice)
                         : cuda::choose(static_cast<const Forward&>(params), attributes.family,
                                        device, choice);
  }
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return nb::make_tuple(choice.family, choice.name, choice.queries, choice.keys, choice.reason);
}
#endif

// Returns [(name, head_dim)]: the kernels of the sm_90 forward pass (plan/recipes.h).
nb::list cuda_recipes() {
  nb::list all;
#ifdef JAX_FLASH_WITH_CUDA
  for (const sm90::RecipeRow& row : sm90::kRecipes) {
    all.append(nb::make_tuple(row.name, row.head_dim));
  }
#endif
  return all;
}

// Returns whether this build has the CUDA kernels, as every build with nvcc has.
bool has_cuda() {
#ifdef JAX_FLASH_WITH_CUDA
  return true;
#else
  return false;
#endif
}

// Returns [(pass, family, dtype, head_dim)]: the CUDA instances in CMakeLists.txt that take
// modifiers, without Hopper's for float32, which take calls in place of sm_80 instances. A call
// with a head dim in between runs on the next larger instance.
nb::list cuda_instances() {
  nb::list all;
#ifdef JAX_FLASH_WITH_CUDA
  const auto add = [&all](const char* pass, const auto& table) {
    for (const auto& instance : table) {
      if (!instance.general) continue;  // there is one with the same sizes that takes modifiers
      if (instance.family == 90 && instance.dtype == DType::kFloat32) continue;
      all.append(nb::make_tuple(pass, instance.family, name_of(instance.dtype), instance.head_dim));
    }
  };
  add("forward", cuda::kForwardInstances);
  add("forward", cuda::kForwardFloat8Instances);
  add("backward", cuda::kBackwardInstances);
#endif
  return all;
}

}  // namespace

NB_MODULE(_native, module) {
  module.def("registrations", &registrations);
  module.def("has_cuda", &has_cuda);
  module.def("cuda_instances", &cuda_instances);
  module.def("cuda_recipes", &cuda_recipes);
  module.def("instruction_set", &host::instruction_set);
  module.def("instruction_set_error", &host::instruction_set_error);
  module.def("host_backward_workspace_bytes", &host_backward_workspace_bytes, nb::arg("batch"),
             nb::arg("q_len"), nb::arg("kv_len"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("distance_floats"));
#ifdef JAX_FLASH_WITH_CUDA
  module.def("cuda_kernel", &cuda_kernel, nb::arg("is_backward"), nb::arg("arguments"),
             nb::arg("results"), nb::arg("options"), nb::arg("operands"), nb::arg("gradients"),
             nb::arg("capability"), nb::arg("multiprocessors"), nb::arg("smem_bytes"));
  module.def("cuda_forward_workspace_bytes", &cuda_forward_workspace_bytes, nb::arg("batch"),
             nb::arg("q_len"), nb::arg("kv_len"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("dtype"), nb::arg("segments"),
             nb::arg("bias"), nb::arg("soft_cap_or_dropout"), nb::arg("mask_matrices"),
             nb::arg("mask_rows"), nb::arg("value_matrices"), nb::arg("exact"));
  module.def("cuda_backward_workspace_bytes", &cuda_backward_workspace_bytes, nb::arg("batch"),
             nb::arg("q_len"), nb::arg("kv_len"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("value_dim"), nb::arg("dtype"), nb::arg("segments"),
             nb::arg("deterministic"), nb::arg("distances"), nb::arg("banded"),
             nb::arg("mask_matrices"), nb::arg("mask_rows"), nb::arg("exact"));
#endif
}

}  // namespace jax_flash
