#include "io.h"
#include "core/aten.h"

#include <fmt/ranges.h>

#include <fstream>
#include <iterator>
#include <string_view>

#include "checkpoint/tensor_files.h"
#include "core/error.h"

namespace kiln::conformance {

namespace {

// Python writes numbers that JSON does not have (diffusers' configs hold "lambda_min_clipped": -Infinity).
// They stand for "no limit" wherever they occur, which null says too.
std::string without_infinities(const std::string& text) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < text.size();) {
    if (!in_string) {
      size_t length = 0;
      for (const std::string_view word : {"-Infinity", "Infinity", "NaN"})
        if (length == 0 && text.compare(i, word.size(), word) == 0) length = word.size();
      if (length > 0) {
        result += "null";
        i += length;
        continue;
      }
    }
    if (in_string && text[i] == '\\' && i + 1 < text.size())
      result += text[i++];
    else if (text[i] == '"')
      in_string = !in_string;
    result += text[i++];
  }
  return result;
}

}  // namespace

nlohmann::json read_config(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("config", "cannot read {}", path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  try {
    return nlohmann::json::parse(without_infinities(text));
  } catch (const nlohmann::json::exception& error) {
    fail("config", "{} is not JSON: {}", path, error.what());
  }
}

Inputs::Inputs(const std::string& path) : path_(path), tensors_(load_tensors(path)) {}

at::Tensor Inputs::get(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    std::string names;
    for (const auto& [key, tensor] : tensors_) names += (names.empty() ? "" : ", ") + key;
    fail("inputs", "tensor {} is missing in {}, which holds: {}", name, path_, names);
  }
  return found->second.to(found->second.is_floating_point() ? at::kFloat : at::kLong).contiguous();
}

at::Tensor Inputs::get(const std::string& name, at::IntArrayRef shape) const {
  const at::Tensor tensor = get(name);
  bool fits = tensor.dim() == static_cast<int64_t>(shape.size());
  for (size_t i = 0; fits && i < shape.size(); ++i)
    fits = shape[i] < 0 || shape[i] == tensor.size(static_cast<int64_t>(i));
  if (!fits)
    fail("inputs", "expected {} of shape ({}), got ({}) in {}; -1 is any size", name, fmt::join(shape, ", "),
         fmt::join(tensor.sizes(), ", "), path_);
  return tensor;
}

at::Tensor Inputs::get_integers(const std::string& name, at::IntArrayRef shape) const {
  const at::Tensor tensor = get(name, shape), integers = tensor.to(at::kLong);
  if (tensor.is_floating_point() && !at::equal(integers.to(tensor.scalar_type()), tensor))
    fail("inputs", "expected {} to hold integers (I64), got fractions in {}", name, path_);
  return integers;
}

void write_outputs(const std::string& path, const Tensors& outputs) {
  Tensors converted;
  for (const auto& [name, tensor] : outputs) {
    const at::ScalarType dtype = tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    converted[name] = tensor.detach().to(at::kCPU, dtype).contiguous();
  }
  save_tensors(path, converted);
}

}  // namespace kiln::conformance
