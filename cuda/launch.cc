// Implements launch.h: chooses the kernel for a call and launches it.

#include "launch.h"

#include <string>

#include "instances.h"

namespace jax_flash::cuda {
namespace {

Status current_device(Device& device) {
  int index = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&index);
  const auto read = [&](cudaDeviceAttr attribute, int& value) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, index);
  };
  read(cudaDevAttrComputeCapabilityMajor, major);
  read(cudaDevAttrComputeCapabilityMinor, minor);
  read(cudaDevAttrMultiProcessorCount, device.multiprocessors);
  read(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.smem_bytes);
  device.capability = 10 * major + minor;
  if (error == cudaSuccess) return {};
  return Status::internal(std::string("jax_flash: cannot read the device's attributes: ") +
                          cudaGetErrorString(error));
}

template <typename Table, typename Params, typename... More>
Status launch(const Table& table, const Choice& choice, cudaStream_t stream, const Params& params,
              const More&... more) {
  const auto* instance =
      find_instance(table, choice.family, params.query.dtype, params.shape, choice.general);
  return instance->launch(params, more..., choice, stream);
}

}  // namespace

Status choose(const Forward& params, int family, const Device& device, Choice& choice) {
  if (params.query.dtype == DType::kFloat8) {
    return choose_forward(params, family, device, instances_of(kForwardFloat8Instances, params),
                          choice);
  }
  return choose_forward(params, family, device, instances_of(kForwardInstances, params), choice);
}
Status choose(const Backward& params, int family, const Device& device, Choice& choice) {
  return choose_backward(params, family, device, instances_of(kBackwardInstances, params), choice);
}

Status forward(const Forward& params, const Scales& scales, int family, cudaStream_t stream) {
  Device device;
  Choice choice;
  Status status = current_device(device);
  if (status.ok()) status = choose(params, family, device, choice);
  if (status.ok() && params.query.dtype == DType::kFloat8) {
    return launch(kForwardFloat8Instances, choice, stream, params, scales);
  }
  if (status.ok()) status = launch(kForwardInstances, choice, stream, params);
  const bool exact_logits = choice.family == 80 || params.query.dtype == DType::kFloat32;
  if (!status.ok() || exact_logits || !adds_to_logits(params)) return status;
  // The sm_90 kernels for 16 bits assume that a row's greatest logit is moderate. A bias or slopes
  // can make a logit arbitrarily large or small. The sm_80 kernel, which is exact for all logits,
  // therefore computes tiles with extreme rows again.
  Forward rest = params;
  rest.extreme_rows_only = true;
  Choice exact;
  status = choose(rest, 80, device, exact);
  return status.ok() ? launch(kForwardInstances, exact, stream, rest) : status;
}

Status backward(const Backward& params, int family, cudaStream_t stream) {
  Device device;
  Choice choice;
  Status status = current_device(device);
  if (status.ok()) status = choose(params, family, device, choice);
  return status.ok() ? launch(kBackwardInstances, choice, stream, params) : status;
}

}  // namespace jax_flash::cuda
