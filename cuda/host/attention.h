// The operation on the CPU. See kernel.cc for the algorithm.
#pragma once

#include <cstdint>
#include <functional>

#include "params.h"
#include "status.h"

namespace jax_flash::host {

// Runs body(0) ... body(count - 1), concurrently where it can, and returns when
// all have finished. Supplied by the caller, so that this folder knows no runtime.
using ParallelFor = std::function<void(int64_t count, const std::function<void(int64_t)>& body)>;

Status forward(const Forward& params, const ParallelFor& parallel_for);
Status backward(const Backward& params, const ParallelFor& parallel_for);

// Bytes that backward() needs at Backward::workspace. `distance_floats`: as params.h counts them.
int64_t backward_workspace_bytes(const Shape& shape, int64_t distance_floats);

// The instruction set in use: "avx512", "avx2" or "baseline".
const char* instruction_set();

}  // namespace jax_flash::host
