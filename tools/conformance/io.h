// What every verb reads and writes: a JSON config, safetensors in, one safetensors file out.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "core/error.h"
#include "core/json.h"

namespace kiln::conformance {

using Tensors = std::map<std::string, at::Tensor>;

// Throws Error naming the file and what is wrong in it.
nlohmann::json read_config(const std::string& path);

// parse(the JSON in the file `path`); an Error of it names the file, too.
template <class Parse>
auto parse_config(const std::string& path, const Parse& parse) {
  const nlohmann::json config = read_config(path);
  try {
    return parse(config);
  } catch (const Error& error) {
    throw Error(fmt::format("{} ({})", error.what(), path));
  }
}

// The input tensors of a verb, with errors that name the file and the tensor.
class Inputs {
 public:
  explicit Inputs(const std::string& path);

  bool has(const std::string& name) const { return tensors_.contains(name); }
  // Floating-point tensors as f32, integers as I64, contiguous. Throws Error when absent, listing what there
  // is.
  at::Tensor get(const std::string& name) const;
  // The same, and throws Error when the shape is another. -1 accepts any size.
  at::Tensor get(const std::string& name, at::IntArrayRef shape) const;
  // The same as I64; throws Error for fractions.
  at::Tensor get_integers(const std::string& name, at::IntArrayRef shape) const;
  const Tensors& all() const { return tensors_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Tensors tensors_;
};

// Written as contiguous F32 on the CPU (F64 stays F64).
void write_outputs(const std::string& path, const Tensors& outputs);

}  // namespace kiln::conformance
