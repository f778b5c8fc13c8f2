// Programmatic dependent launch: sm_90. PTX ISA, "griddepcontrol".
#pragma once

namespace jax_flash::ptx {

// What precedes the wait may run beside the kernel before this one; what that kernel wrote is
// visible after it.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace jax_flash::ptx
