// What every verb reads and writes: a JSON config, safetensors in, one safetensors file out.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace kiln::conformance {

using Tensors = std::map<std::string, at::Tensor>;

// Throws Error naming the file and what is wrong in it.
nlohmann::json read_config(const std::string& path);

// The input tensors of a verb, with errors that name the file and the tensor.
class Inputs {
 public:
  explicit Inputs(const std::string& path);

  bool has(const std::string& name) const { return tensors_.contains(name); }
  // Floating-point tensors as f32, integers as I64, contiguous. Throws Error when absent, listing what there
  // is.
  at::Tensor get(const std::string& name) const;
  // As get(), or an undefined tensor when absent.
  at::Tensor get_if(const std::string& name) const { return has(name) ? get(name) : at::Tensor(); }
  // As get(); throws Error when the shape is another. -1 accepts any size.
  at::Tensor get(const std::string& name, at::IntArrayRef shape) const;
  const Tensors& all() const { return tensors_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Tensors tensors_;
};

// Written as contiguous F32 on the CPU (F64 stays F64).
void write_outputs(const std::string& path, const Tensors& outputs);

}  // namespace kiln::conformance
