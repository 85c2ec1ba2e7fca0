// Layers as models hold them: handles to named weights. The weight is looked up at every call, because
// training rebinds Parameter::value to a view of its segment's flat buffer.
#pragma once
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/model.h"

namespace kiln {

struct Linear {
  std::shared_ptr<Parameter> weight;  // (out, in)
  std::shared_ptr<Parameter> bias;    // (out), or null

  at::Tensor forward(const at::Tensor& x, at::ScalarType compute_dtype) const;
};

struct Conv2d {
  std::shared_ptr<Parameter> weight;  // (out, in, k, k)
  std::shared_ptr<Parameter> bias;    // (out)
  int64_t stride = 1, padding = 0;

  at::Tensor forward(const at::Tensor& x, at::ScalarType compute_dtype) const;
};

struct GroupNorm {
  std::shared_ptr<Parameter> weight, bias;  // (C)
  int64_t num_groups = 32;
  double eps = 1e-6;

  // silu: the norm is followed by SiLU. Keeps the dtype and the memory format of x (B, C, H, W).
  at::Tensor forward(const at::Tensor& x, bool silu) const;
};

// Creates weights under a key prefix and appends them to a list in the order of creation.
class ParameterScope {
 public:
  ParameterScope(ParameterList& list, const BuildOptions& options, std::string prefix = "");

  // `name` below this one: keys become prefix + name + "." + ...
  ParameterScope under(const std::string& name) const;
  // An uninitialised f32 weight.
  std::shared_ptr<Parameter> add(const std::string& name, at::IntArrayRef shape, Init init,
                                 bool trainable = true) const;
  // name.weight (out, in) drawn from `weight_init`, name.bias (out) zero.
  Linear linear(const std::string& name, int64_t in, int64_t out, Init weight_init) const;
  // Weight and bias drawn from U(+-1 / sqrt(fan_in)), PyTorch's own default.
  Linear uniform_linear(const std::string& name, int64_t in, int64_t out) const;
  Conv2d conv2d(const std::string& name, int64_t in, int64_t out, int64_t kernel, int64_t stride = 1,
                int64_t padding = 0) const;
  GroupNorm group_norm(const std::string& name, int64_t channels, int64_t num_groups, double eps) const;
  Linear xavier_linear(const std::string& name, int64_t in, int64_t out) const {
    return linear(name, in, out, Init::xavier_uniform(in, out));
  }

 private:
  ParameterList& list_;
  BuildOptions options_;
  std::string prefix_;
};

}  // namespace kiln
