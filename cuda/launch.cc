// Chooses the kernel instance for a call. See cmake/Instances.cmake for the table.

#include "launch.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "instances.h"
#include "plan/backward_workspace.h"
#include "plan/decode.h"
#include "plan/half_values.h"
#include "plan/mask_words.h"
#include "plan/tensor_map.h"

namespace jax_flash::cuda {
namespace {

// The kernels hold row and column indices, and sums of the two, in 32 bits, a tile past the end
// included.
constexpr int64_t kMaxTotalLength = (int64_t{1} << 31) - 1024;

// Whether only the general instance takes the call.
bool needs_general(const Forward& params) {
  const Options& options = params.options;
  // A plain instance takes row maxima before scaling.
  return params.bias || params.mask || params.query_segment_ids || options.dropout_threshold != 0 ||
         options.logits_soft_cap > 0.0f || !(options.scale > 0.0f);
}

Status check_operand(const char* name, const Shape& shape, const Operand& operand) {
  bool aligned = reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && operand.row % 8 == 0 &&
                 operand.head % 8 == 0;
  for (int axis = 0; axis < shape.num_batch_dims; ++axis) {
    aligned = aligned && operand.batch[axis] % 8 == 0;
  }
  if (aligned) return {};
  return Status::invalid_argument(std::string("jax_flash: ") + name +
                                  ": expected an address and strides that are multiples of 16 "
                                  "bytes");
}

Status check_call(const Forward& params) {
  const Shape& shape = params.shape;
  if (shape.batch == 0 || shape.q_len == 0 || shape.kv_len == 0 || shape.heads == 0) {
    return Status::unimplemented(
        "jax_flash: axes: expected at least one batch entry, query, key and head; without, there is "
        "nothing to compute");
  }
  const auto bad_dim = [](int32_t dim) { return dim <= 0 || dim % 8 != 0; };
  if (bad_dim(shape.head_dim) || bad_dim(shape.value_dim)) {
    return Status::unimplemented("jax_flash: head dims: expected multiples of 8, got " +
                                 std::to_string(shape.head_dim) + " and " +
                                 std::to_string(shape.value_dim));
  }
  if (int64_t{shape.q_len} + shape.kv_len > kMaxTotalLength) {
    return Status::unimplemented("jax_flash: q_len + kv_len: expected at most " +
                                 std::to_string(kMaxTotalLength) + ", got " +
                                 std::to_string(int64_t{shape.q_len} + shape.kv_len));
  }
  for (const auto& [name, operand] : {std::pair<const char*, const Operand&>{"query", params.query},
                                      {"key", params.key},
                                      {"value", params.value},
                                      {"out", params.out}}) {
    if (Status status = check_operand(name, shape, operand); !status.ok()) return status;
  }
  return {};
}

// The current device's compute capability, 90 for 9.0.
Status compute_capability(int32_t& capability) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  capability = 10 * major + minor;
  if (error == cudaSuccess) return {};
  return Status::internal(std::string("jax_flash: cannot read the device's compute capability: ") +
                          cudaGetErrorString(error));
}

// Whether the copy engine can fetch tiles of the operands, of which the first ones have query rows
// and the others keys: the sm_90 family has no other way.
bool fits_copy_engine(const Shape& shape, const std::initializer_list<const Operand*>& queries,
                      const std::initializer_list<const Operand*>& keys) {
  const auto all_fit = [&](const auto& operands, int64_t rows) {
    return std::all_of(operands.begin(), operands.end(), [&](const Operand* operand) {
      return fits_tensor_map(shape, *operand, rows);
    });
  };
  return all_fit(queries, shape.q_len) && all_fit(keys, shape.kv_len);
}

// `fits_90`: whether the sm_90 family takes the operands as they lie.
template <typename Params, typename Table>
Status launch(const Table& table, const Params& params, int family, bool fits_90,
              cudaStream_t stream) {
  const Shape& shape = params.shape;
  if (family != 0 && family != 80 && family != 90) {
    return Status::unimplemented("jax_flash: kernel family: expected 80 or 90, got " +
                                 std::to_string(family));
  }
  const auto find = [&](int32_t number) {
    return find_instance(table, number, params.query.dtype, shape, needs_general(params));
  };
  const auto* instance = find(80);
  if (family != 80) {
    int32_t capability = 0;
    if (Status status = compute_capability(capability); !status.ok()) return status;
    const bool takes = capability == 90 && fits_90;
    if (family == 90 && !takes) {
      return Status::unimplemented(
          capability == 90 ? "jax_flash: the sm_90 kernels take operands of at most " +
                                 std::to_string(kTensorMapBatchDims) +
                                 " batch axes that no axis of length or heads is broadcast in"
                           : "jax_flash: the sm_90 kernels run on sm_90 only, and this GPU is sm_" +
                                 std::to_string(capability));
    }
    if (const auto* newer = takes ? find(90) : nullptr; newer != nullptr) {
      instance = newer;
    } else if (family == 90) {
      instance = nullptr;
    }
  }
  if (instance == nullptr) {
    return Status::unimplemented("jax_flash: no kernel for this dtype with head_dim " +
                                 std::to_string(shape.head_dim) + " and value_dim " +
                                 std::to_string(shape.value_dim));
  }
  Status status = instance->launch(params, stream);
  if constexpr (std::is_same_v<Params, Forward>) {
    // The sm_90 kernels take it that a row's greatest logit is of moderate size. With a bias it may
    // be of any: those rows are for the sm_80 kernel, which is exact there.
    if (status.ok() && instance != find(80) && params.bias) {
      Forward rest = params;
      rest.extreme_rows_only = true;
      const auto* exact = find(80);
      status = exact == nullptr ? Status::unimplemented(
                                      "jax_flash: this build lacks the sm_80 kernel that completes "
                                      "a call with a bias")
                                : exact->launch(rest, stream);
    }
  }
  return status;
}

}  // namespace

Status forward(const Forward& params, int family, cudaStream_t stream) {
  if (Status status = check_call(params); !status.ok()) return status;
  const bool fits = fits_copy_engine(params.shape, {&params.query}, {&params.key, &params.value});
  return launch(kForwardInstances, params, family, fits, stream);
}

Status backward(const Backward& params, int family, cudaStream_t stream) {
  if (Status status = check_call(params); !status.ok()) return status;
  for (const auto& [name, operand] : {std::pair<const char*, const Operand&>{"dout", params.dout},
                                      {"dquery", params.dquery},
                                      {"dkey", params.dkey},
                                      {"dvalue", params.dvalue}}) {
    if (Status status = check_operand(name, params.shape, operand); !status.ok()) return status;
  }
  const bool fits = fits_copy_engine(params.shape, {&params.query, &params.out, &params.dout},
                                     {&params.key, &params.value});
  return launch(kBackwardInstances, params, family, fits, stream);
}

int64_t forward_workspace_bytes(const Shape& shape, DType dtype, const ForwardFeatures& features) {
  if (features.segments) return SegmentSpans::bytes(shape);
  const bool masked = features.mask_matrices > 0;
  int64_t bytes = masked ? sm90::MaskWords::bytes(shape, features.mask_matrices, features.mask_rows)
                         : sm90::DecodeWorkspace::bytes(shape);
  if (sm90::HalfValues::takes(shape, dtype, features.bias != masked && !features.others)) {
    bytes =
        sm90::HalfValues::align(bytes) + sm90::HalfValues::bytes(shape, features.value_matrices);
  }
  return bytes;
}

int64_t forward_workspace_bytes(const Forward& params) {
  const Shape& shape = params.shape;
  const Options& options = params.options;
  const sm90::MaskMatrices mask(shape, params.mask);
  ForwardFeatures features;
  features.segments = bool{params.query_segment_ids};
  features.bias = bool{params.bias};
  features.others = options.logits_soft_cap > 0.0f || options.dropout_threshold != 0;
  features.mask_matrices = params.mask ? mask.matrices() : 0;
  features.mask_rows = mask.rows;
  features.value_matrices = sm90::ValueMatrices(shape, params.value).count();
  return forward_workspace_bytes(shape, params.query.dtype, features);
}

int64_t backward_workspace_bytes(const Shape& shape, bool segments, bool deterministic) {
  // No instance has a head dim above the next multiple of 64.
  const int64_t head_dim = (std::max(shape.head_dim, shape.value_dim) + 63) / 64 * 64;
  BackwardWorkspace workspace;
  return BackwardWorkspace::plan(shape, head_dim, segments, deterministic, nullptr, workspace);
}

}  // namespace jax_flash::cuda
