// Divides a call into tasks, and runs them with the best kernel that this CPU can execute.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>

#include "host/attention.h"
#include "host/kernel.h"

namespace jax_flash::host {
namespace {

// This environment variable limits the kernel to an older instruction set, for tests and
// measurements on a CPU with newer ones.
constexpr const char* kMaxIsa = "JAX_FLASH_CPU_MAX_ISA";

// Returns the variable's value, "" if it is unset. It is read once: a later change has no effect.
const std::string& max_isa() {
  static const std::string limit = [] {
    const char* value = std::getenv(kMaxIsa);
    return std::string(value ? value : "");
  }();
  return limit;
}

bool can_run(const Kernel& kernel) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&kernel == &avx512::kKernel) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (&kernel == &avx2::kKernel) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
#endif
  return &kernel == &baseline::kKernel;
}

// Returns the best kernel that this CPU can execute, up to the one that JAX_FLASH_CPU_MAX_ISA
// names, or nullptr if the variable names no kernel.
const Kernel* choose_kernel() {
#if defined(__x86_64__)
  const Kernel* const best_first[] = {&avx512::kKernel, &avx2::kKernel, &baseline::kKernel};
#else
  const Kernel* const best_first[] = {&baseline::kKernel};
#endif
  bool within_limit = max_isa().empty();
  for (const Kernel* kernel : best_first) {
    within_limit = within_limit || max_isa() == kernel->instruction_set;
    if (within_limit && can_run(*kernel)) return kernel;
  }
  return nullptr;
}

const Kernel* kernel() {
  static const Kernel* const chosen = choose_kernel();
  return chosen;
}

// Runs one pass. Returns false if any task found no scratch memory.
template <typename Call>
bool run(const ParallelFor& parallel_for, bool (*pass)(const Call&, int64_t), const Call& call,
         int64_t tasks) {
  if (tasks == 0) return true;
  std::atomic<bool> ok{true};
  parallel_for(tasks, [&](int64_t task) {
    if (!pass(call, task)) ok.store(false, std::memory_order_relaxed);
  });
  return ok.load();
}

Status status_of(bool ok) {
  if (ok) return {};
  return Status::internal("jax_flash: no memory for the scratch space of a CPU thread");
}

Status no_such_kernel() {
  return Status::invalid_argument("jax_flash: " + instruction_set_error());
}

}  // namespace

const char* instruction_set() {
  const Kernel* chosen = kernel();
  return chosen ? chosen->instruction_set : "none";
}

std::string instruction_set_error() {
  if (kernel()) return {};
  return std::string(kMaxIsa) + ": expected avx512, avx2 or baseline, got " + max_isa() +
         "; set one of them or unset it";
}

Status forward(const Forward& params, const ParallelFor& parallel_for) {
  const Kernel* passes = kernel();
  if (!passes) return no_such_kernel();
  const Shape& s = params.shape;
  static const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  const ForwardTasks tasks = {params, forward_split(s, threads)};
  return status_of(run(parallel_for, passes->forward, tasks,
                       s.batch * s.kv_heads * tasks.split.parts * tasks.split.runs));
}

int64_t backward_workspace_bytes(const Shape& shape, int64_t distance_floats) {
  const int64_t of_chunk = dquery_floats(shape) + shape.batch * shape.heads * distance_floats;
  const int64_t floats = delta_floats(shape) + backward_chunks(shape) * of_chunk;
  return floats * int64_t{sizeof(float)};
}

Status backward(const Backward& params, const ParallelFor& parallel_for) {
  const Kernel* passes = kernel();
  if (!passes) return no_such_kernel();
  const Shape& s = params.shape;
  const int64_t heads = s.batch * s.heads;
  const int64_t tasks = s.batch * s.kv_heads * backward_chunks(s);
  bool ok = run(parallel_for, passes->delta, params, heads) &&
            run(parallel_for, passes->backward, params, tasks) &&
            run(parallel_for, passes->reduce_dquery, params, heads * q_blocks(s));
  if (ok && distance_floats(params) > 0)
    ok = run(parallel_for, passes->reduce_distance, params, heads);
  if (ok && params.dbias && !keeps_every_axis(s, params.dbias)) {
    const BiasTiling tiling = bias_tiling(s, params.dbias);
    ok = run(parallel_for, passes->dbias, params,
             tiling.batches * tiling.heads * tiling.q_tiles * tiling.kv_tiles);
  }
  return status_of(ok);
}

}  // namespace jax_flash::host
