// Launches kernels from the host, and returns errors of launches as a Status.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "params.h"
#include "plan/divisor.h"
#include "status.h"

// Switch of the ablation (sm90/backward/config.cuh): 0 starts each kernel only when the kernel
// before it has ended.
#ifndef JAX_FLASH_SM90_BWD_DEPENDENT_LAUNCH
#define JAX_FLASH_SM90_BWD_DEPENDENT_LAUNCH 1
#endif

namespace jax_flash {

inline std::string shape_text(const Shape& shape) {
  return "batch " + std::to_string(shape.batch) + ", q_len " + std::to_string(shape.q_len) +
         ", kv_len " + std::to_string(shape.kv_len) + ", heads " + std::to_string(shape.heads) +
         "/" + std::to_string(shape.kv_heads) + ", head_dim " + std::to_string(shape.head_dim) +
         ", value_dim " + std::to_string(shape.value_dim);
}

// Dynamic shared memory up to this size needs no attribute. The limit is 48 KB, but a kernel's
// static shared memory counts, too.
inline constexpr int kSmemWithoutAsking = 24 * 1024;

// Launches a kernel with a one-dimensional grid. Its shared-memory limit is set in every call,
// because the attribute belongs to the current device's context. Setting it costs less than
// remembering the devices for which it is set, and is safe from any thread. `dependent`: the kernel
// may begin while the kernel before it ends (programmatic dependent launch), and waits by
// griddepcontrol for its results.
template <typename... Parameters, typename... Arguments>
Status launch_grid(bool dependent, const char* name, const Shape& shape,
                   void (*kernel)(Parameters...), int64_t blocks, int threads, int smem_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  if (blocks == 0) return {};
  const auto failed = [&](cudaError_t error) {
    cudaGetLastError();  // reported here, so cleared for later callers
    return Status::internal(std::string("jax_flash: kernel ") + name + " (" + shape_text(shape) +
                            "): " + cudaGetErrorString(error));
  };
  if (blocks > INT32_MAX) {
    return Status::unimplemented(std::string("jax_flash: kernel ") + name + " (" +
                                 shape_text(shape) + "): needs " + std::to_string(blocks) +
                                 " blocks, more than 2^31 - 1");
  }
  if (smem_bytes > kSmemWithoutAsking) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (error != cudaSuccess) return failed(error);
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? Status{} : failed(error);
}

template <typename... Arguments>
Status launch_kernel(const Arguments&... arguments) {
  return launch_grid(false, arguments...);
}

template <typename... Arguments>
Status launch_dependent(const Arguments&... arguments) {
  return launch_grid(JAX_FLASH_SM90_BWD_DEPENDENT_LAUNCH != 0, arguments...);
}

inline Status multiprocessors(int& count) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) return {};
  return Status::internal(std::string("jax_flash: cannot read the device's size: ") +
                          cudaGetErrorString(error));
}

}  // namespace jax_flash
