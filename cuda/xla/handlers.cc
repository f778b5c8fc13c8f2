// Implements the custom calls "jax_flash_forward", "jax_flash_backward" and, on GPUs,
// "jax_flash_quantize". Each handler reads its call, checks it and launches it. On a GPU, a handler
// allocates nothing, reads no device memory and launches the same kernels on every call with the
// same shapes and attributes. XLA may therefore record it into a command buffer.

#include "xla/handlers.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "host/attention.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"
#include "xla/ffi_call.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "launch.h"
#include "quantize/quantize.h"
#include "xla/quantize_call.h"
#endif

namespace ffi = xla::ffi;

namespace jax_flash {
namespace {

ffi::Error to_error(const Status& status) {
  switch (status.code) {
    case Status::Code::kOk: return ffi::Error::Success();
    case Status::Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, status.message);
    case Status::Code::kUnimplemented:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, status.message);
    case Status::Code::kInternal: break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message);
}

// Spreads a loop over XLA's thread pool. The calling thread works, too, and waits only for indices
// that another thread has begun. So the loop cannot deadlock if all threads of the pool are busy,
// perhaps with other loops of this kind.
host::ParallelFor parallel_for_on(ffi::ThreadPool& pool) {
  return [&pool](int64_t count, const std::function<void(int64_t)>& body) {
    struct Loop {
      const std::function<void(int64_t)>* body;
      int64_t count;
      std::atomic<int64_t> next{0};
      std::mutex mutex;
      std::condition_variable done;
      int64_t finished = 0;

      void work() {
        int64_t mine = 0;
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count; ++mine) {
          (*body)(i);
        }
        if (mine == 0) return;
        std::lock_guard<std::mutex> lock(mutex);
        finished += mine;
        if (finished == count) done.notify_one();
      }
    };
    // Shared ownership: the pool may run a task only after the loop has ended, and the task still
    // reads `next`.
    auto loop = std::make_shared<Loop>();
    loop->body = &body;
    loop->count = count;
    const int64_t helpers = std::min(pool.num_threads(), count) - 1;
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([loop] { loop->work(); });
    loop->work();
    std::unique_lock<std::mutex> lock(loop->mutex);
    loop->done.wait(lock, [&] { return loop->finished == count; });
  };
}

Status check_workspace(const Call& call, int64_t needed) {
  if (call.workspace_bytes >= needed) return {};
  return Status::invalid_argument("jax_flash: workspace: expected " + std::to_string(needed) +
                                  " bytes, got " + std::to_string(call.workspace_bytes));
}

ffi::Error forward_host(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                        OptionAttributes options, int32_t operands) {
  Call call;
  Status status = read_forward(buffers_of(args), buffers_of(results), options, operands, call);
  if (status.ok() && call.params.query.dtype == DType::kFloat8) {
    status = Status::unimplemented("jax_flash: no CPU kernel takes operands of float8");
  }
  if (status.ok()) status = host::forward(call.params, parallel_for_on(pool));
  return to_error(status);
}

ffi::Error backward_host(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                         OptionAttributes options, int32_t operands, int32_t gradients) {
  Call call;
  Status status =
      read_backward(buffers_of(args), buffers_of(results), options, operands, gradients, call);
  if (status.ok()) {
    const Backward& params = call.params;
    status = check_workspace(call,
                             host::backward_workspace_bytes(params.shape, distance_floats(params)));
  }
  if (status.ok()) status = host::backward(call.params, parallel_for_on(pool));
  return to_error(status);
}

#ifdef JAX_FLASH_WITH_CUDA
ffi::Error forward_cuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets results,
                        OptionAttributes options, int32_t operands) {
  Call call;
  Status status = read_forward(buffers_of(args), buffers_of(results), options, operands, call);
  if (status.ok()) {
    status = check_workspace(call, forward_workspace_bytes(call.params));
  }
  if (status.ok()) status = cuda::forward(call.params, call.scales, options.family, stream);
  return to_error(status);
}

ffi::Error backward_cuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets results,
                         OptionAttributes options, int32_t operands, int32_t gradients) {
  Call call;
  Status status =
      read_backward(buffers_of(args), buffers_of(results), options, operands, gradients, call);
  if (status.ok()) {
    status = check_workspace(
        call, backward_workspace_bytes(call.params.shape, BackwardFeatures::of(call.params)));
  }
  if (status.ok()) status = cuda::backward(call.params, options.family, stream);
  return to_error(status);
}

ffi::Error quantize_cuda(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets results,
                         int64_t block, int32_t rotated, int64_t seed) {
  Quantize call;
  Status status = read_quantize(buffers_of(args), buffers_of(results), block, rotated, seed, call);
  if (status.ok()) status = launch_quantize(call, stream);
  return to_error(status);
}
#endif  // JAX_FLASH_WITH_CUDA

// Binds the arguments, results and attributes of a handler. `Context` is the thread pool or stream.
template <typename Context>
auto binding() {
  return ffi::Ffi::Bind()
      .template Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<OptionAttributes>("options")
      .template Attr<int32_t>("operands");
}
template <typename Context>
auto backward_binding() {
  return binding<Context>().template Attr<int32_t>("gradients");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardHost, forward_host, binding<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardHost, backward_host, backward_binding<ffi::ThreadPool>());

#ifdef JAX_FLASH_WITH_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardCuda, forward_cuda,
                              binding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardCuda, backward_cuda,
                              backward_binding<ffi::PlatformStream<cudaStream_t>>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(kQuantizeCuda, quantize_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("block")
                                  .Attr<int32_t>("rotated")
                                  .Attr<int64_t>("seed"),
                              {ffi::Traits::kCmdBufferCompatible});
#endif  // JAX_FLASH_WITH_CUDA

}  // namespace jax_flash
