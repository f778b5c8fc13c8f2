// Defines the outcome of a native call: success, or a message that the user gets as a
// jax.errors.JaxRuntimeError. Custom calls neither throw nor abort.
#pragma once

#include <string>
#include <utility>

namespace jax_flash {

struct Status {
  enum class Code { kOk, kInvalidArgument, kUnimplemented, kInternal };
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status invalid_argument(std::string message) {
    return {Code::kInvalidArgument, std::move(message)};
  }
  static Status unimplemented(std::string message) {
    return {Code::kUnimplemented, std::move(message)};
  }
  static Status internal(std::string message) { return {Code::kInternal, std::move(message)}; }
};

}  // namespace jax_flash
