// Splits a call into tasks and runs them with the best kernel that this CPU can execute.
#include <atomic>

#include "host/attention.h"
#include "host/kernel.h"

namespace jax_flash::host {
namespace {

const Kernel& kernel() {
#if defined(__x86_64__)
  static const Kernel& best = [&]() -> const Kernel& {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return avx512::kKernel;
    }
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has_avx2 ? avx2::kKernel : baseline::kKernel;
  }();
  return best;
#else
  return baseline::kKernel;
#endif
}

// Runs one pass; false if any task ran out of memory.
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

}  // namespace

const char* instruction_set() { return kernel().instruction_set; }

Status forward(const Forward& params, const ParallelFor& parallel_for) {
  const Shape& s = params.shape;
  const ForwardSplit split = forward_split(s);
  const int64_t tasks = s.batch * s.kv_heads * split.parts * split.q_blocks;
  return status_of(run(parallel_for, kernel().forward, params, tasks));
}

int64_t backward_workspace_bytes(const Shape& shape, DType) {
  const int64_t floats = delta_floats(shape) + backward_chunks(shape) * dquery_floats(shape);
  return floats * int64_t{sizeof(float)};
}

Status backward(const Backward& params, const ParallelFor& parallel_for) {
  const Shape& s = params.shape;
  const int64_t heads = s.batch * s.heads;
  const int64_t tasks = s.batch * s.kv_heads * backward_chunks(s);
  bool ok = run(parallel_for, kernel().delta, params, heads) &&
            run(parallel_for, kernel().backward, params, tasks) &&
            run(parallel_for, kernel().reduce_dquery, params, heads * q_blocks(s));
  if (ok && params.dbias && !keeps_every_axis(s, params.dbias)) {
    const BiasTiling tiling = bias_tiling(s, params.dbias);
    ok = run(parallel_for, kernel().dbias, params,
             tiling.batches * tiling.heads * tiling.q_tiles * tiling.kv_tiles);
  }
  return status_of(ok);
}

}  // namespace jax_flash::host
