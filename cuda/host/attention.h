// Runs the forward or backward pass on the CPU. kernel.cc describes the algorithm.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "params.h"
#include "status.h"

namespace jax_flash::host {

// Runs body(0) ... body(count - 1), concurrently if possible, and returns when all have finished.
// The caller provides it, so that this folder depends on no thread pool.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

Status forward(const Forward& params, const ParallelFor& parallel_for);
Status backward(const Backward& params, const ParallelFor& parallel_for);

// Returns the bytes that backward() needs at Backward::workspace. `distance_floats` is the result
// of distance_floats() in params.h.
int64_t backward_workspace_bytes(const Shape& shape, int64_t distance_floats);

// Returns the instruction set in use: "avx512", "avx2" or "baseline"; "none" if
// JAX_FLASH_CPU_MAX_ISA names no instruction set.
const char* instruction_set();

// Returns what is wrong with JAX_FLASH_CPU_MAX_ISA, "" if nothing is.
std::string instruction_set_error();

}  // namespace jax_flash::host
