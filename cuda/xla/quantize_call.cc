// Implements quantize_call.h: reads the arrays, their results and the attributes.

#include "xla/quantize_call.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

using xla::ffi::DataType;

Status read_dtype(DataType type, DType& dtype) {
  for (const auto& [known, read] :
       {std::pair{DataType::F32, DType::kFloat32}, std::pair{DataType::BF16, DType::kBFloat16},
        std::pair{DataType::F16, DType::kFloat16}}) {
    if (type != known) continue;
    dtype = read;
    return {};
  }
  return Status::invalid_argument("jax_flash: quantize: expected bfloat16, float16 or float32");
}

bool is(const Buffer& buffer, DataType type, const std::vector<int64_t>& dims) {
  return buffer.type == type &&
         std::equal(dims.begin(), dims.end(), buffer.dims.begin(), buffer.dims.end());
}

Status read_array(const Buffer& x, const Buffer& values, const Buffer& scale, int64_t block,
                  int64_t rotation, Rounding& array) {
  const auto dims = x.dims;
  if (dims.size() != 5 || std::any_of(dims.begin(), dims.end(),
                                      [](int64_t dim) { return dim < 1 || dim > INT32_MAX; })) {
    return Status::invalid_argument(
        "jax_flash: quantize: expected [sets, batch, T, heads, D], each of 1 to 2^31 - 1");
  }
  if (dims[4] % 8 != 0 || dims[4] > 256) {
    return Status::unimplemented(
        "jax_flash: quantize: expected a head dim that is a multiple of 8 and at most 256, got " +
        std::to_string(dims[4]));
  }
  const int64_t tokens = std::min(block, dims[2]);
  const std::vector<int64_t> scales =
      block > 0 ? std::vector{dims[0], dims[1], (dims[2] + tokens - 1) / tokens, dims[3]}
                : std::vector<int64_t>{dims[0], 1, 1, 1};
  if (!is(values, DataType::F8E4M3FN, {dims.begin(), dims.end()}) ||
      !is(scale, DataType::F32, scales)) {
    return Status::invalid_argument("jax_flash: quantize: unexpected shapes of results");
  }
  array = {.x = x.data,
           .values = static_cast<uint8_t*>(values.data),
           .scale = static_cast<float*>(scale.data),
           .sets = static_cast<int32_t>(dims[0]),
           .length = static_cast<int32_t>(dims[2]),
           .heads = static_cast<int32_t>(dims[3]),
           .head_dim = static_cast<int32_t>(dims[4]),
           .batch = dims[1],
           .rotation = rotation};
  return {};
}

}  // namespace

Status read_quantize(const Buffers& args, const Buffers& results, int64_t block, int32_t rotated,
                     int64_t seed, Quantize& call) {
  const size_t count = args.size();
  if (count < 1 || count > Quantize::kMost || results.size() != 2 * count || block < 0 ||
      seed < 0) {
    return Status::invalid_argument(
        "jax_flash: quantize: expected one to three arrays, values and scales of each, and a block "
        "and a seed of 0 or more");
  }
  call.count = static_cast<int32_t>(count);
  call.block = block;
  Status status = read_dtype(args[0].type, call.dtype);
  for (size_t i = 0; i < count && status.ok(); ++i) {
    if (args[i].type != args[0].type) {
      return Status::invalid_argument("jax_flash: quantize: the arrays differ in dtype");
    }
    status = read_array(args[i], results[i], results[count + i], block,
                        rotated >> i & 1 ? seed : -1, call.arrays[i]);
  }
  return status;
}

}  // namespace jax_flash
