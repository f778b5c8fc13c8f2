// Wraps programmatic dependent launch: sm_90. PTX ISA, "griddepcontrol".
#pragma once

namespace jax_flash::ptx {

// Waits until the previous kernel has ended. Code before the wait may overlap that kernel. After
// the wait, its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace jax_flash::ptx
