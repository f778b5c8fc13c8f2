// Implements ffi_call.h: reads operands, results and options, and reports the first error.

#include "xla/ffi_call.h"

#include <string>
#include <utility>
#include <vector>

namespace ffi = xla::ffi;

namespace jax_flash {
namespace {

std::string dims_text(const std::vector<int64_t>& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? "," : "") + std::to_string(dims[i]);
  return text + "]";
}

// Describes one axis after the batch axes: the member of Operand that gets its stride, its size,
// and whether the axis may have size 1 instead (broadcast).
struct Axis {
  int64_t Operand::* stride;
  int64_t size;
  bool broadcasts = false;
  bool pads = false;  // true if the array may have fewer than 8 elements more, which nothing reads
};

// Reads buffers as operands of one call, and keeps the first error.
class Reader {
 public:
  explicit Reader(const Shape& shape) : shape_(shape) {}

  enum class Kind { kFloat, kFloatOrFloat8, kFloat32, kBool, kInt32, kUInt32 };

  // `batch_broadcasts`: true if a batch axis may have size 1 where that of the call is larger.
  Operand read(const char* name, const Buffer& buffer, Kind kind, const std::vector<Axis>& axes,
               bool batch_broadcasts) {
    Operand operand;
    const auto dims = buffer.dims;
    const int num_batch = shape_.num_batch_dims;
    std::vector<int64_t> expected(shape_.batch_dims, shape_.batch_dims + num_batch);
    for (const Axis& axis : axes) expected.push_back(axis.size);
    bool matches = dims.size() == expected.size();
    for (size_t i = 0; matches && i < expected.size(); ++i) {
      const bool is_batch = static_cast<int>(i) < num_batch;
      const bool broadcasts = is_batch ? batch_broadcasts : axes[i - num_batch].broadcasts;
      const int64_t most = expected[i] + (!is_batch && axes[i - num_batch].pads ? 7 : 0);
      matches = (dims[i] >= expected[i] && dims[i] <= most) || (broadcasts && dims[i] == 1);
    }
    if (!matches) {
      fail(std::string(name) + ": expected shape " + dims_text(expected) + ", got " +
           dims_text({dims.begin(), dims.end()}));
      return operand;
    }
    if (!read_dtype(buffer.type, kind, operand.dtype)) {
      fail(std::string(name) + ": unexpected element type " +
           std::to_string(static_cast<int>(buffer.type)));
      return operand;
    }
    int64_t stride = 1;
    for (int i = static_cast<int>(dims.size()) - 1; i >= 0; --i) {
      int64_t& slot = i < num_batch ? operand.batch[i] : operand.*axes[i - num_batch].stride;
      slot = dims[i] == 1 ? 0 : stride;
      stride *= dims[i];
    }
    // Kernels assume unit stride of an innermost axis that is not broadcast, also if its size is 1.
    if (!axes.empty() && !axes.back().broadcasts && axes.back().stride == &Operand::col) {
      operand.col = 1;
    }
    static char empty;  // an operand without elements is present, so its pointer must not be null
    operand.data = stride == 0 ? &empty : buffer.data;
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
      case Kind::kFloatOrFloat8:
      case Kind::kFloat: break;
    }
    switch (type) {
      case ffi::DataType::F8E4M3FN: dtype = DType::kFloat8; return kind == Kind::kFloatOrFloat8;
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

// Describes a named operand or result, and the member of Backward that it is read into.
struct Field {
  const char* name;
  Operand Backward::* where;
  Kind kind;
  std::vector<Axis> axes;
  // False if every batch axis has full size: for results but dbias, for operands that are results
  // of the forward pass, and for their cotangents.
  bool batch_broadcasts = true;
};

std::vector<Axis> query_axes(const Shape& s, int64_t dim) {
  return {{&Operand::row, s.q_len}, {&Operand::head, s.heads}, {&Operand::col, dim}};
}
std::vector<Axis> key_axes(const Shape& s, int64_t dim) {
  return {{&Operand::row, s.kv_len}, {&Operand::head, s.kv_heads}, {&Operand::col, dim}};
}
std::vector<Axis> lse_axes(const Shape& s) {
  return {{&Operand::head, s.heads}, {&Operand::row, s.q_len}};
}
std::vector<Axis> logit_axes(const Shape& s, bool pads = false) {
  return {{&Operand::head, s.heads, true},
          {&Operand::row, s.q_len, true},
          {&Operand::col, s.kv_len, true, pads}};
}

std::vector<Field> operand_fields(const Shape& s) {
  constexpr Kind kKind = Kind::kFloatOrFloat8;
  return {{"query", &Backward::query, kKind, query_axes(s, s.head_dim)},
          {"key", &Backward::key, kKind, key_axes(s, s.head_dim)},
          {"value", &Backward::value, kKind, key_axes(s, s.value_dim)}};
}

Field lse_low_field(const Shape& s) {
  return {"lse_low", &Backward::lse_low, Kind::kFloat32, lse_axes(s), false};
}

std::vector<Field> output_fields(const Shape& s, bool with_lse_low) {
  std::vector<Field> fields{
      {"out", &Backward::out, Kind::kFloat, query_axes(s, s.value_dim), false},
      {"lse", &Backward::lse, Kind::kFloat32, lse_axes(s), false}};
  if (with_lse_low) fields.push_back(lse_low_field(s));
  return fields;
}

Field dout_field(const Shape& s) {
  return {"dout", &Backward::dout, Kind::kFloat, query_axes(s, s.value_dim), false};
}

// Lists the axes of the relative bias or its gradient, which have a number for each of R distances.
std::vector<Axis> distance_axes(const Shape& s, int32_t distances, bool head_broadcasts) {
  return {{&Operand::head, s.heads, head_broadcasts}, {&Operand::col, distances}};
}

// Slots, as in operands.py, of the optional operands that have a gradient, and the first of the
// kScales slots of scales.
constexpr int kBiasSlot = 0, kAlibiSlot = 13, kRelativeSlot = 14, kScaleSlot = 15, kScales = 3;

// Lists the results of the backward pass. Bit i of `wanted` says whether the gradient of the
// optional operand in slot i is one of them.
std::vector<Field> gradient_fields(const Shape& s, int32_t distances, int32_t wanted) {
  std::vector<Field> fields{
      {"dquery", &Backward::dquery, Kind::kFloat, query_axes(s, s.head_dim), false},
      {"dkey", &Backward::dkey, Kind::kFloat, key_axes(s, s.head_dim), false},
      {"dvalue", &Backward::dvalue, Kind::kFloat, key_axes(s, s.value_dim), false}};
  const auto want = [&](int slot, Field field) {
    if (wanted >> slot & 1) fields.push_back(std::move(field));
  };
  want(kBiasSlot, {"dbias", &Backward::dbias, Kind::kFloat, logit_axes(s, true)});
  want(kAlibiSlot, {"dalibi_slopes",
                    &Backward::dalibi_slopes,
                    Kind::kFloat32,
                    {{&Operand::head, s.heads}},
                    false});
  want(kRelativeSlot, {"drelative_bias", &Backward::drelative_bias, Kind::kFloat32,
                       distance_axes(s, distances, false), false});
  return fields;
}

// Lists the optional operands, but not the scales, in the order of the slots of operands.py. Bit i
// of the attribute `operands` says whether number i is present.
std::vector<Field> optional_fields(const Shape& s, int32_t distances) {
  const Axis head{&Operand::head, s.heads}, query_row{&Operand::row, s.q_len};
  const Axis key_row{&Operand::row, s.kv_len}, word{&Operand::col, 2};
  return {
      {"bias", &Backward::bias, Kind::kFloat, logit_axes(s, true)},
      {"mask", &Backward::mask, Kind::kBool, logit_axes(s)},
      {"query_seq_lengths", &Backward::query_seq_lengths, Kind::kInt32, {}},
      {"key_value_seq_lengths", &Backward::key_value_seq_lengths, Kind::kInt32, {}},
      {"query_segment_ids", &Backward::query_segment_ids, Kind::kInt32, {query_row}},
      {"key_value_segment_ids", &Backward::key_value_segment_ids, Kind::kInt32, {key_row}},
      {"query_offset", &Backward::query_offset, Kind::kInt32, {}},
      {"sinks", &Backward::sinks, Kind::kFloat32, {head}},
      {"dropout_keys", &Backward::dropout_keys, Kind::kUInt32, {head, {&Operand::col, 3}}},
      {"dlse", &Backward::dlse, Kind::kFloat32, lse_axes(s), false},
      {"dropout_start", &Backward::dropout_start, Kind::kInt32, {word}},
      lse_low_field(s),
      {"window", &Backward::window, Kind::kInt32, {word}},
      {"alibi_slopes", &Backward::alibi_slopes, Kind::kFloat32, {head}},
      {"relative_bias", &Backward::relative_bias, Kind::kFloat32,
       distance_axes(s, distances, true)},
  };
}

// Reads the scales of float8 operands, [batch, heads, blocks] each, from argument `first` on.
Status read_scales(const Buffers& args, size_t first, int32_t present, Reader& reader, Call& call) {
  const Shape& s = call.params.shape;
  const bool is_float8 = call.params.query.dtype == DType::kFloat8;
  if ((present >> kScaleSlot) != (is_float8 ? (1 << kScales) - 1 : 0)) {
    return Status::invalid_argument(
        "jax_flash: operands of float8 come with three scales, others with none");
  }
  if (!is_float8) return {};
  const auto axes = [](int32_t heads, int32_t length) -> std::vector<Axis> {
    return {{&Operand::head, heads, true},
            {&Operand::row, (int64_t{length} + kScaleBlock - 1) / kScaleBlock, true}};
  };
  const auto read = [&](const char* name, const std::vector<Axis>& shape) {
    return reader.read(name, args[first++], Reader::Kind::kFloat32, shape, true);
  };
  call.scales.query = read("query_scale", axes(s.heads, s.q_len));
  call.scales.key = read("key_scale", axes(s.kv_heads, s.kv_len));
  call.scales.value = read("value_scale", axes(s.kv_heads, s.kv_len));
  return reader.status();
}

// Reads the sizes of a call from query, key and value, and the batch axes from `full`, a buffer
// whose batch axes all have full size.
Status read_shape(const Buffer& query, const Buffer& key, const Buffer& value, const Buffer& full,
                  Shape& shape) {
  const auto q = query.dims, k = key.dims, v = value.dims;
  const int num_batch = static_cast<int>(q.size()) - 3;
  if (num_batch < 1 || num_batch > kMaxBatchDims || k.size() != q.size() || v.size() != q.size() ||
      full.dims.size() != q.size()) {
    return Status::invalid_argument("jax_flash: query, key, value: expected equal ranks of 4 to " +
                                    std::to_string(3 + kMaxBatchDims) + ", got " +
                                    std::to_string(q.size()) + ", " + std::to_string(k.size()) +
                                    ", " + std::to_string(v.size()));
  }
  for (const auto& dims : {q, k, v, full.dims}) {
    for (const int64_t dim : dims) {
      if (dim > INT32_MAX) {
        return Status::invalid_argument("jax_flash: an axis has more than 2^31 - 1 elements");
      }
    }
  }
  shape.num_batch_dims = num_batch;
  for (int i = 0; i < num_batch; ++i) {
    shape.batch_dims[i] = full.dims[i];
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

Buffer as_buffer(ffi::AnyBuffer buffer) {
  const auto dims = buffer.dimensions();
  return {const_cast<void*>(buffer.untyped_data()),
          buffer.element_type(),
          {dims.begin(), dims.size()},
          static_cast<int64_t>(buffer.size_bytes())};
}
Buffer as_buffer(ffi::Result<ffi::AnyBuffer> result) { return as_buffer(*result); }

template <typename Remaining>
Buffers read_all(const Remaining& remaining) {
  Buffers buffers;
  for (size_t i = 0; i < remaining.size(); ++i) {
    const auto buffer = remaining.template get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return {};
    buffers.push_back(as_buffer(*buffer));
  }
  return buffers;
}

// Reads `fields` from consecutive buffers, of which `first` is the index of the first one.
Status read_fields(const Buffers& buffers, size_t first, const std::vector<Field>& fields,
                   Reader& reader, Backward& params) {
  for (const Field& field : fields) {
    if (first >= buffers.size()) {
      return Status::invalid_argument(std::string("jax_flash: ") + field.name + " is missing");
    }
    params.*field.where =
        reader.read(field.name, buffers[first++], field.kind, field.axes, field.batch_broadcasts);
  }
  return reader.status();
}

// Reads R, the size of the last axis of the relative bias. The relative bias is the last argument:
// only scales would follow it, and float8 calls, which have scales, have no relative bias.
Status read_distances(const Buffers& args, int32_t present, Backward& params) {
  if (!(present >> kRelativeSlot & 1)) return {};
  const int64_t distances = args.back().dims.empty() ? 0 : args.back().dims.back();
  if (distances < 1 || distances > INT32_MAX) {
    return Status::invalid_argument("jax_flash: relative_bias: expected 1 to 2^31 - 1 distances");
  }
  params.distances = static_cast<int32_t>(distances);
  return {};
}

Status read_optional(const Buffers& args, size_t first, int32_t present, Reader& reader,
                     Call& call) {
  Backward& params = call.params;
  const Shape& shape = params.shape;
  if (Status status = read_distances(args, present, params); !status.ok()) return status;
  std::vector<Field> fields;
  int bit = 0;
  for (Field& field : optional_fields(shape, params.distances)) {
    if (present >> bit++ & 1) fields.push_back(std::move(field));
  }
  if (Status status = read_fields(args, first, fields, reader, params); !status.ok()) return status;
  const size_t expected = fields.size() + (present >> kScaleSlot ? kScales : 0);
  if (first + expected != args.size()) {
    return Status::invalid_argument("jax_flash: expected " + std::to_string(expected) +
                                    " optional operands, got " +
                                    std::to_string(args.size() - first));
  }
  if (Status status = read_scales(args, first + fields.size(), present, reader, call);
      !status.ok()) {
    return status;
  }
  const bool one_sided = bool{params.query_segment_ids} != bool{params.key_value_segment_ids};
  if (one_sided || (params.options.dropout_threshold != 0 && !params.dropout_keys)) {
    return Status::invalid_argument(
        "jax_flash: segment ids come for both query and key/value; dropout needs its keys");
  }
  return {};
}

// Kernels take the dtype of the query, or of the bias, for that of all these.
Status same_dtypes(const Forward& params) {
  const DType dtype = params.query.dtype;
  if (params.key.dtype == dtype && params.value.dtype == dtype &&
      (params.out.dtype == dtype || dtype == DType::kFloat8)) {
    return {};
  }
  return Status::invalid_argument("jax_flash: query, key, value and out differ in dtype");
}

Status same_dtypes(const Backward& params) {
  for (const Operand* operand : {&params.key, &params.value, &params.out, &params.dout,
                                 &params.dquery, &params.dkey, &params.dvalue}) {
    if (operand->dtype != params.query.dtype) {
      return Status::invalid_argument(
          "jax_flash: query, key, value, out and gradients differ in dtype");
    }
  }
  if (!params.dbias || params.dbias.dtype == params.bias.dtype) return {};
  return Status::invalid_argument("jax_flash: bias and dbias differ in dtype");
}

// Kernels assume that lse_low is present if something is added to the logits.
Status check_lse_low(const Forward& params) {
  if (bool{params.lse_low} == adds_to_logits(params)) return {};
  return Status::invalid_argument(
      "jax_flash: lse_low comes with what is added to the logits (bias, alibi_slopes, "
      "relative_bias), and with nothing else");
}

// Only an operand that is present can have a gradient.
Status check_gradients(const Backward& params, int32_t wanted) {
  const int32_t present = bool{params.bias} << kBiasSlot | bool{params.alibi_slopes} << kAlibiSlot |
                          bool{params.relative_bias} << kRelativeSlot;
  if ((wanted & ~present) == 0) return {};
  return Status::invalid_argument(
      "jax_flash: gradients: expected bits of bias, alibi_slopes or relative_bias, as far as they "
      "are operands");
}

Status too_few() { return Status::invalid_argument("jax_flash: operands or results are missing"); }

}  // namespace

Buffers buffers_of(ffi::RemainingArgs args) { return read_all(args); }
Buffers buffers_of(ffi::RemainingRets results) { return read_all(results); }

Status read_forward(const Buffers& args, const Buffers& results, const OptionAttributes& options,
                    int32_t operands, Call& call) {
  if (args.size() < 3 || results.size() < 3) return too_few();
  Backward& params = call.params;
  Shape& shape = params.shape;
  Status status = read_shape(args[0], args[1], args[2], results[0], shape);
  if (!status.ok()) return status;
  params.options = options.options;
  Reader reader(shape);
  status = read_fields(args, 0, operand_fields(shape), reader, params);
  if (status.ok()) status = read_optional(args, 3, operands, reader, call);
  const std::vector<Field> outputs = output_fields(shape, adds_to_logits(params));
  if (status.ok() && results.size() != outputs.size() + 1) status = too_few();
  if (status.ok()) status = read_fields(results, 0, outputs, reader, params);
  if (status.ok()) status = same_dtypes(static_cast<const Forward&>(params));
  if (status.ok()) status = check_lse_low(params);
  params.workspace = results.back().data;
  call.workspace_bytes = results.back().bytes;
  return status;
}

Status read_backward(const Buffers& args, const Buffers& results, const OptionAttributes& options,
                     int32_t operands, int32_t gradients, Call& call) {
  if (args.size() < 6 || results.empty()) return too_few();
  Backward& params = call.params;
  Shape& shape = params.shape;
  Status status = read_shape(args[0], args[1], args[2], args[3], shape);
  if (!status.ok()) return status;
  params.options = options.options;
  Reader reader(shape);
  status = read_fields(args, 0, operand_fields(shape), reader, params);
  if (status.ok()) status = read_fields(args, 3, output_fields(shape, false), reader, params);
  if (status.ok()) status = read_fields(args, 5, {dout_field(shape)}, reader, params);
  if (status.ok()) status = read_optional(args, 6, operands, reader, call);
  if (status.ok()) status = check_lse_low(params);
  if (status.ok()) status = check_gradients(params, gradients);
  const std::vector<Field> wanted = gradient_fields(shape, params.distances, gradients);
  if (status.ok() && results.size() != wanted.size() + 1) status = too_few();
  if (status.ok()) status = read_fields(results, 0, wanted, reader, params);
  if (status.ok()) status = same_dtypes(params);
  params.workspace = results.back().data;
  call.workspace_bytes = results.back().bytes;
  return status;
}

}  // namespace jax_flash
