// Wraps programmatic dependent launch: sm_90. PTX ISA, "griddepcontrol".
#pragma once

namespace jax_flash::ptx {

// Waits for the kernel before this one: code before the wait may overlap that kernel, and what it
// wrote is visible after the wait.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace jax_flash::ptx
