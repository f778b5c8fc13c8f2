// The custom calls "jax_flash_forward" and "jax_flash_backward": the one file that
// sees XLA's FFI. A handler turns buffers and attributes into a Forward or Backward,
// checking every shape again (Python has checked already; exported programs and
// other callers have not), and launches. On a GPU it allocates nothing, reads no
// device memory and launches the same kernels on every call with the same shapes,
// so that XLA may record it into a command buffer.
//
// Arguments: query, key, value, [out, lse, dout,] then those of kOptional that the
// attribute `operands` names, in order. Every operand has the same number of leading
// batch axes, each full or 1 (broadcast).
// Results: out, lse, workspace, or dquery, dkey, dvalue, [dbias,] workspace.

#include "handlers.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "host/attention.h"
#include "params.h"
#include "status.h"
#include "xla/ffi/api/ffi.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "launch.h"
#endif

namespace ffi = xla::ffi;

namespace jax_flash {
namespace {

// The attribute `options`; the fields are those of spec.py's ffi_attributes().
struct OptionAttributes {
  float scale;
  bool is_causal;
  int32_t window_left;
  int32_t window_right;
  float logits_soft_cap;
  int32_t dropout_threshold;
  float dropout_scale;
  bool deterministic;
  int32_t family;  // CUDA kernel family: 0 the best, 80, 90
};

}  // namespace
}  // namespace jax_flash

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::jax_flash::OptionAttributes, ::xla::ffi::StructMember<float>("scale"),
    ::xla::ffi::StructMember<bool>("is_causal"), ::xla::ffi::StructMember<int32_t>("window_left"),
    ::xla::ffi::StructMember<int32_t>("window_right"),
    ::xla::ffi::StructMember<float>("logits_soft_cap"),
    ::xla::ffi::StructMember<int32_t>("dropout_threshold"),
    ::xla::ffi::StructMember<float>("dropout_scale"),
    ::xla::ffi::StructMember<bool>("deterministic"), ::xla::ffi::StructMember<int32_t>("family"));

namespace jax_flash {
namespace {

std::string dims_text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? "," : "") + std::to_string(dims[i]);
  return text + "]";
}

// One axis after the batch axes: which stride it sets, its size, and whether a
// size of 1 may stand for any size.
struct Axis {
  int64_t Operand::* stride;
  int64_t size;
  bool broadcasts = false;
};

// Reads buffers as operands of one call, collecting the first error.
class Reader {
 public:
  explicit Reader(const Shape& shape) : shape_(shape) {}

  enum class Kind { kFloat, kFloat32, kBool, kInt32, kUInt32 };

  // `batch_broadcasts`: a batch axis may be 1 where the call's is larger.
  template <typename Buffer>
  Operand read(const char* name, const Buffer& buffer, Kind kind, const std::vector<Axis>& axes,
               bool batch_broadcasts) {
    Operand operand;
    const auto dims = buffer.dimensions();
    const int num_batch = shape_.num_batch_dims;
    std::vector<int64_t> expected(shape_.batch_dims, shape_.batch_dims + num_batch);
    for (const Axis& axis : axes) expected.push_back(axis.size);
    bool matches = dims.size() == expected.size();
    for (size_t i = 0; matches && i < expected.size(); ++i) {
      const bool broadcasts =
          static_cast<int>(i) < num_batch ? batch_broadcasts : axes[i - num_batch].broadcasts;
      matches = dims[i] == expected[i] || (broadcasts && dims[i] == 1);
    }
    if (!matches) {
      fail(std::string(name) + ": expected shape " + dims_text(expected) + ", got " +
           dims_text({dims.begin(), dims.end()}));
      return operand;
    }
    if (!read_dtype(buffer.element_type(), kind, operand.dtype)) {
      fail(std::string(name) + ": unexpected element type " +
           std::to_string(static_cast<int>(buffer.element_type())));
      return operand;
    }
    int64_t stride = 1;
    for (int i = static_cast<int>(dims.size()) - 1; i >= 0; --i) {
      int64_t& slot = i < num_batch ? operand.batch[i] : operand.*axes[i - num_batch].stride;
      slot = dims[i] == 1 ? 0 : stride;
      stride *= dims[i];
    }
    // A contiguous innermost axis of size 1 keeps unit stride: kernels assume it.
    if (!axes.empty() && !axes.back().broadcasts && axes.back().stride == &Operand::col) {
      operand.col = 1;
    }
    static char empty;  // a zero-sized operand is present all the same
    operand.data = stride == 0 ? &empty : const_cast<void*>(buffer.untyped_data());
    return operand;
  }

  void fail(std::string message) {
    if (status_.ok()) status_ = Status::invalid_argument("jax_flash: " + std::move(message));
  }
  const Status& status() const { return status_; }

 private:
  static bool read_dtype(ffi::DataType type, Kind kind, DType& dtype) {
    switch (kind) {
      case Kind::kBool: return type == ffi::DataType::PRED;
      case Kind::kInt32: return type == ffi::DataType::S32;
      case Kind::kUInt32: return type == ffi::DataType::U32;
      case Kind::kFloat32: dtype = DType::kFloat32; return type == ffi::DataType::F32;
      case Kind::kFloat: break;
    }
    switch (type) {
      case ffi::DataType::F32: dtype = DType::kFloat32; return true;
      case ffi::DataType::BF16: dtype = DType::kBFloat16; return true;
      case ffi::DataType::F16: dtype = DType::kFloat16; return true;
      default: return false;
    }
  }

  const Shape& shape_;
  Status status_;
};

using Kind = Reader::Kind;

struct OptionalOperand {
  const char* name;
  Operand Backward::* field;
  Kind kind;
  std::vector<Axis> axes;
};

// In the order of spec.py's OPTIONAL_OPERANDS: bit i of `operands` says whether
// number i is present.
std::vector<OptionalOperand> optional_operands(const Shape& s) {
  const Axis head{&Operand::head, s.heads}, row{&Operand::row, s.q_len};
  const std::vector<Axis> logits{{&Operand::head, s.heads, true},
                                 {&Operand::row, s.q_len, true},
                                 {&Operand::col, s.kv_len, true}};
  return {
      {"bias", &Backward::bias, Kind::kFloat, logits},
      {"mask", &Backward::mask, Kind::kBool, logits},
      {"query_seq_lengths", &Backward::query_seq_lengths, Kind::kInt32, {}},
      {"key_value_seq_lengths", &Backward::key_value_seq_lengths, Kind::kInt32, {}},
      {"query_segment_ids", &Backward::query_segment_ids, Kind::kInt32, {row}},
      {"key_value_segment_ids",
       &Backward::key_value_segment_ids,
       Kind::kInt32,
       {{&Operand::row, s.kv_len}}},
      {"query_offset", &Backward::query_offset, Kind::kInt32, {}},
      {"sinks", &Backward::sinks, Kind::kFloat32, {head}},
      {"dropout_seed", &Backward::dropout_seed, Kind::kUInt32, {{&Operand::col, 2}}},
      {"dropout_batch_ids", &Backward::dropout_batch_ids, Kind::kInt32, {}},
      {"dropout_head_ids", &Backward::dropout_head_ids, Kind::kInt32, {head}},
      {"lse_cotangent", &Backward::dlse, Kind::kFloat32, {head, row}},
  };
}

template <typename Buffer>
Status read_shape(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                  const ffi::AnyBuffer& value, const Buffer& full, Shape& shape) {
  const auto q = query.dimensions(), k = key.dimensions(), v = value.dimensions();
  const int num_batch = static_cast<int>(q.size()) - 3;
  if (num_batch < 1 || num_batch > kMaxBatchDims || k.size() != q.size() || v.size() != q.size() ||
      full.dimensions().size() != q.size()) {
    return Status::invalid_argument(
        "jax_flash: query, key, value: expected equal ranks of 4 to " +
        std::to_string(3 + kMaxBatchDims) + ", got " + std::to_string(q.size()) + ", " +
        std::to_string(k.size()) + ", " + std::to_string(v.size()));
  }
  for (const auto& dims : {q, k, v}) {
    for (const int64_t dim : dims) {
      if (dim > INT32_MAX) {
        return Status::invalid_argument("jax_flash: an axis has more than 2^31 - 1 elements");
      }
    }
  }
  shape.num_batch_dims = num_batch;
  for (int i = 0; i < num_batch; ++i) {
    shape.batch_dims[i] = full.dimensions()[i];
    shape.batch *= shape.batch_dims[i];
  }
  shape.q_len = static_cast<int32_t>(q[num_batch]);
  shape.heads = static_cast<int32_t>(q[num_batch + 1]);
  shape.head_dim = static_cast<int32_t>(q[num_batch + 2]);
  shape.kv_len = static_cast<int32_t>(k[num_batch]);
  shape.kv_heads = static_cast<int32_t>(k[num_batch + 1]);
  shape.value_dim = static_cast<int32_t>(v[num_batch + 2]);
  if (shape.kv_heads == 0 ? shape.heads != 0 : shape.heads % shape.kv_heads != 0) {
    return Status::invalid_argument("jax_flash: " + std::to_string(shape.heads) +
                                    " query heads are no multiple of " +
                                    std::to_string(shape.kv_heads) + " key/value heads");
  }
  return {};
}

Options make_options(const OptionAttributes& attributes) {
  Options options;
  options.scale = attributes.scale;
  options.is_causal = attributes.is_causal;
  options.window_left = attributes.window_left;
  options.window_right = attributes.window_right;
  options.logits_soft_cap = attributes.logits_soft_cap;
  options.dropout_threshold = static_cast<uint32_t>(attributes.dropout_threshold);
  options.dropout_scale = attributes.dropout_scale;
  options.deterministic = attributes.deterministic;
  return options;
}

// The axes of query-like, key-like and lse-like operands.
std::vector<Axis> query_axes(const Shape& s, int64_t dim) {
  return {{&Operand::row, s.q_len}, {&Operand::head, s.heads}, {&Operand::col, dim}};
}
std::vector<Axis> key_axes(const Shape& s, int64_t dim) {
  return {{&Operand::row, s.kv_len}, {&Operand::head, s.kv_heads}, {&Operand::col, dim}};
}
std::vector<Axis> lse_axes(const Shape& s) {
  return {{&Operand::head, s.heads}, {&Operand::row, s.q_len}};
}

Status read_optional(ffi::RemainingArgs args, size_t first, int32_t present, Reader& reader,
                     const Shape& shape, Backward& params) {
  size_t next = first;
  int bit = 0;
  for (const OptionalOperand& optional : optional_operands(shape)) {
    if (!(present >> bit++ & 1)) continue;
    const auto buffer = args.get<ffi::AnyBuffer>(next++);
    if (!buffer.has_value()) {
      return Status::invalid_argument(std::string("jax_flash: ") + optional.name + " is missing");
    }
    params.*optional.field =
        reader.read(optional.name, *buffer, optional.kind, optional.axes, true);
  }
  if (next != args.size()) {
    return Status::invalid_argument("jax_flash: expected " + std::to_string(next) +
                                    " optional operands, got " + std::to_string(args.size()));
  }
  const bool one_sided = bool{params.query_segment_ids} != bool{params.key_value_segment_ids};
  const bool incomplete = params.options.dropout_threshold != 0 &&
                          !(params.dropout_seed && params.dropout_batch_ids &&
                            params.dropout_head_ids);
  if (one_sided || incomplete) {
    return Status::invalid_argument(
        "jax_flash: segment ids come for both query and key/value; dropout needs seed, batch and "
        "head ids");
  }
  return reader.status();
}

Status same_dtype(const Forward& params) {
  if (params.key.dtype == params.query.dtype && params.value.dtype == params.query.dtype) return {};
  return Status::invalid_argument("jax_flash: query, key and value differ in dtype");
}

Status read_forward(ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                    ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> out,
                    ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> workspace,
                    const OptionAttributes& options, int32_t operands, Backward& params) {
  Shape& shape = params.shape;
  if (Status status = read_shape(query, key, value, *out, shape); !status.ok()) return status;
  params.options = make_options(options);
  Reader reader(shape);
  params.query = reader.read("query", query, Kind::kFloat, query_axes(shape, shape.head_dim), true);
  params.key = reader.read("key", key, Kind::kFloat, key_axes(shape, shape.head_dim), true);
  params.value = reader.read("value", value, Kind::kFloat, key_axes(shape, shape.value_dim), true);
  params.out = reader.read("out", *out, Kind::kFloat, query_axes(shape, shape.value_dim), false);
  params.lse = reader.read("lse", *lse, Kind::kFloat32, lse_axes(shape), false);
  params.workspace = workspace->untyped_data();
  if (Status status = read_optional(optional, 0, operands, reader, shape, params); !status.ok()) {
    return status;
  }
  return same_dtype(params);
}

Status read_backward(ffi::AnyBuffer query, ffi::AnyBuffer key, ffi::AnyBuffer value,
                     ffi::AnyBuffer out, ffi::AnyBuffer lse, ffi::AnyBuffer dout,
                     ffi::RemainingArgs optional, ffi::Result<ffi::AnyBuffer> dquery,
                     ffi::Result<ffi::AnyBuffer> dkey, ffi::Result<ffi::AnyBuffer> dvalue,
                     ffi::RemainingRets results, const OptionAttributes& options, int32_t operands,
                     Backward& params, int64_t& workspace_bytes) {
  Shape& shape = params.shape;
  if (Status status = read_shape(query, key, value, out, shape); !status.ok()) return status;
  params.options = make_options(options);
  Reader reader(shape);
  const auto q_axes = query_axes(shape, shape.head_dim), k_axes = key_axes(shape, shape.head_dim);
  const auto o_axes = query_axes(shape, shape.value_dim), v_axes = key_axes(shape, shape.value_dim);
  params.query = reader.read("query", query, Kind::kFloat, q_axes, true);
  params.key = reader.read("key", key, Kind::kFloat, k_axes, true);
  params.value = reader.read("value", value, Kind::kFloat, v_axes, true);
  params.out = reader.read("out", out, Kind::kFloat, o_axes, false);
  params.lse = reader.read("lse", lse, Kind::kFloat32, lse_axes(shape), false);
  params.dout = reader.read("dout", dout, Kind::kFloat, o_axes, false);
  params.dquery = reader.read("dquery", *dquery, Kind::kFloat, q_axes, false);
  params.dkey = reader.read("dkey", *dkey, Kind::kFloat, k_axes, false);
  params.dvalue = reader.read("dvalue", *dvalue, Kind::kFloat, v_axes, false);
  if (Status status = read_optional(optional, 0, operands, reader, shape, params); !status.ok()) {
    return status;
  }
  if (results.size() == 2) {
    auto dbias = results.get<ffi::AnyBuffer>(0);
    if (!dbias.has_value()) return Status::invalid_argument("jax_flash: dbias is missing");
    params.dbias = reader.read("dbias", **dbias, Kind::kFloat, optional_operands(shape)[0].axes,
                               true);
  } else if (results.size() != 1) {
    return Status::invalid_argument("jax_flash: expected 1 or 2 results after dvalue");
  }
  auto workspace = results.get<ffi::AnyBuffer>(results.size() - 1);
  if (!workspace.has_value()) return Status::invalid_argument("jax_flash: workspace is missing");
  params.workspace = (*workspace)->untyped_data();
  workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
  if (!reader.status().ok()) return reader.status();
  return same_dtype(params);
}

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

// Spreads a loop over XLA's thread pool. The calling thread works too and waits only
// for indices that another thread has begun, so a pool whose threads are all busy,
// with this very call perhaps, cannot deadlock it.
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
    // Tasks that the pool gets to only after the loop has ended still look at it.
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

ffi::Error forward_host(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                        ffi::AnyBuffer value, ffi::RemainingArgs optional,
                        ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                        ffi::Result<ffi::AnyBuffer> workspace, OptionAttributes options,
                        int32_t operands) {
  Backward params;
  Status status = read_forward(query, key, value, optional, out, lse, workspace, options, operands,
                               params);
  if (status.ok()) status = host::forward(params, parallel_for_on(pool));
  return to_error(status);
}

ffi::Error backward_host(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                         ffi::AnyBuffer value, ffi::AnyBuffer out, ffi::AnyBuffer lse,
                         ffi::AnyBuffer dout, ffi::RemainingArgs optional,
                         ffi::Result<ffi::AnyBuffer> dquery, ffi::Result<ffi::AnyBuffer> dkey,
                         ffi::Result<ffi::AnyBuffer> dvalue, ffi::RemainingRets results,
                         OptionAttributes options, int32_t operands) {
  Backward params;
  int64_t workspace_bytes = 0;
  Status status = read_backward(query, key, value, out, lse, dout, optional, dquery, dkey, dvalue,
                                results, options, operands, params, workspace_bytes);
  if (status.ok() &&
      workspace_bytes < host::backward_workspace_bytes(params.shape, params.query.dtype)) {
    status = Status::invalid_argument("jax_flash: the workspace is too small");
  }
  if (status.ok()) status = host::backward(params, parallel_for_on(pool));
  return to_error(status);
}

#ifdef JAX_FLASH_WITH_CUDA
ffi::Error forward_cuda(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key,
                        ffi::AnyBuffer value, ffi::RemainingArgs optional,
                        ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                        ffi::Result<ffi::AnyBuffer> workspace, OptionAttributes options,
                        int32_t operands) {
  Backward params;
  Status status = read_forward(query, key, value, optional, out, lse, workspace, options, operands,
                               params);
  const bool segments = bool{params.query_segment_ids};
  if (status.ok() && static_cast<int64_t>(workspace->size_bytes()) <
                         cuda::forward_workspace_bytes(params.shape, segments)) {
    status = Status::invalid_argument("jax_flash: the workspace is too small");
  }
  if (status.ok()) status = cuda::forward(params, options.family, stream);
  return to_error(status);
}

ffi::Error backward_cuda(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key,
                         ffi::AnyBuffer value, ffi::AnyBuffer out, ffi::AnyBuffer lse,
                         ffi::AnyBuffer dout, ffi::RemainingArgs optional,
                         ffi::Result<ffi::AnyBuffer> dquery, ffi::Result<ffi::AnyBuffer> dkey,
                         ffi::Result<ffi::AnyBuffer> dvalue, ffi::RemainingRets results,
                         OptionAttributes options, int32_t operands) {
  Backward params;
  int64_t workspace_bytes = 0;
  Status status = read_backward(query, key, value, out, lse, dout, optional, dquery, dkey, dvalue,
                                results, options, operands, params, workspace_bytes);
  const bool segments = bool{params.query_segment_ids};
  if (status.ok() && workspace_bytes < cuda::backward_workspace_bytes(
                                           params.shape, segments, options.deterministic)) {
    status = Status::invalid_argument("jax_flash: the workspace is too small");
  }
  if (status.ok()) status = cuda::backward(params, options.family, stream);
  return to_error(status);
}
#endif  // JAX_FLASH_WITH_CUDA

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardHost, forward_host,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<OptionAttributes>("options")
                                  .Attr<int32_t>("operands"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardHost, backward_host,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<OptionAttributes>("options")
                                  .Attr<int32_t>("operands"));

#ifdef JAX_FLASH_WITH_CUDA
XLA_FFI_DEFINE_HANDLER_SYMBOL(kForwardCuda, forward_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<OptionAttributes>("options")
                                  .Attr<int32_t>("operands"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(kBackwardCuda, backward_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .RemainingRets()
                                  .Attr<OptionAttributes>("options")
                                  .Attr<int32_t>("operands"),
                              {ffi::Traits::kCmdBufferCompatible});
#endif  // JAX_FLASH_WITH_CUDA

}  // namespace jax_flash
