// Layers of models: handles to named weights. A layer looks up its weight at every call, because training
// rebinds Parameter::value to a view of its segment's flat buffer. Linear and Conv2d add the outputs of their
// weight's adapters.
#pragma once
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "models/model.h"
#include "ops/ops.h"

namespace kiln {

struct Linear {
  std::shared_ptr<Parameter> weight;  // (out, in)
  std::shared_ptr<Parameter> bias;    // (out), or null
  ops::Products products = ops::Products::kComputeDtype;

  at::Tensor forward(const at::Tensor& x, at::ScalarType compute_dtype) const;
  // Computes forward(gelu_tanh(h)) and saves only h for backward.
  at::Tensor forward_gelu_tanh(const at::Tensor& h, at::ScalarType compute_dtype) const;
  // The same for forward(geglu(h)), but that products in fp8 save geglu's result, in 8 bits.
  at::Tensor forward_geglu(const at::Tensor& h, at::ScalarType compute_dtype) const;
};

// Computes fc2.forward_gelu_tanh(fc1.forward(x)), in one operation if neither layer has an adapter.
at::Tensor gelu_tanh_mlp(const Linear& fc1, const Linear& fc2, const at::Tensor& x,
                         at::ScalarType compute_dtype);

struct GroupNorm;

struct Conv2d {
  std::shared_ptr<Parameter> weight;  // (out, in / groups, k, k)
  std::shared_ptr<Parameter> bias;    // (out), or null
  ops::ConvolutionShape shape{};

  at::Tensor forward(const at::Tensor& x, at::ScalarType compute_dtype) const;
  // Computes forward(norm.forward(x, silu)) and saves only x for backward.
  at::Tensor forward_normed(const GroupNorm& norm, bool silu, const at::Tensor& x,
                            at::ScalarType compute_dtype) const;
  // Computes a convolution of one place each, in rows: x (..., in * k * k) -> (..., out). Of a 1 x 1
  // convolution a place is a pixel, of one with k as stride a patch.
  at::Tensor forward_rows(const at::Tensor& x, at::ScalarType compute_dtype) const;
};

struct GroupNorm {
  std::shared_ptr<Parameter> weight, bias;  // (C)
  int64_t num_groups = 32;
  double eps = 1e-6;

  // Applies the norm, then SiLU if `silu`. Keeps the dtype and the memory format of x (B, C, H, W).
  at::Tensor forward(const at::Tensor& x, bool silu) const;
};

struct LayerNorm {
  std::shared_ptr<Parameter> weight, bias;  // (D)
  double eps = 1e-5;

  // x (..., D); the result is in compute dtype.
  at::Tensor forward(const at::Tensor& x, at::ScalarType compute_dtype) const;
};

// x / sqrt(mean(x^2) + eps) * weight over the last dimension, in f32.
struct RmsNorm {
  std::shared_ptr<Parameter> weight;  // (D)
  double eps = 1e-5;

  at::Tensor forward(const at::Tensor& x, at::ScalarType out_dtype) const;
};

// Computes several linear layers of one input as one product: (..., sum of their widths), in the given order.
at::Tensor joined_linears(std::initializer_list<const Linear*> layers, const at::Tensor& x,
                          at::ScalarType compute_dtype);

// Computes joined_linears of norm.forward(x) and saves only x for backward.
at::Tensor normed_linears(const LayerNorm& norm, std::initializer_list<const Linear*> layers,
                          const at::Tensor& x, at::ScalarType compute_dtype);

// Creates weights under a key prefix and appends them to a list in the order of creation.
class ParameterScope {
 public:
  ParameterScope(ParameterList& list, const BuildOptions& options, std::string prefix = "");

  // Returns a scope below this one. Its keys begin with prefix + name + ".".
  ParameterScope under(const std::string& name) const;
  // Adds an uninitialised f32 weight.
  std::shared_ptr<Parameter> add(const std::string& name, at::IntArrayRef shape, Init init,
                                 bool trainable = true) const;
  // Adds the weight of a layer that computes adapters.
  std::shared_ptr<Parameter> add_adaptable(const std::string& name, at::IntArrayRef shape, Init init) const;
  // Adds name.weight (out, in) drawn from `weight_init`, name.bias (out) zero.
  Linear linear(const std::string& name, int64_t in, int64_t out, Init weight_init) const;
  // Draws weight and bias from U(+-1 / sqrt(fan_in)), as PyTorch does by default.
  Linear uniform_linear(const std::string& name, int64_t in, int64_t out, bool has_bias = true) const;
  Conv2d conv2d(const std::string& name, int64_t in, int64_t out, int64_t kernel, int64_t stride = 1,
                int64_t padding = 0) const;
  // Adds a 1 x 1 convolution drawn from `weight_init`.
  Conv2d pointwise_conv2d(const std::string& name, int64_t in, int64_t out, Init weight_init,
                          bool has_bias) const;
  // Adds `channels` filters that read channels / groups inputs each. Keeps the size of the picture.
  Conv2d grouped_conv2d(const std::string& name, int64_t channels, int64_t kernel, int64_t groups,
                        bool has_bias) const;
  GroupNorm group_norm(const std::string& name, int64_t channels, int64_t num_groups, double eps) const;
  LayerNorm layer_norm(const std::string& name, int64_t width, double eps) const;
  Linear xavier_linear(const std::string& name, int64_t in, int64_t out) const {
    return linear(name, in, out, Init::xavier_uniform(in, out));
  }

 private:
  ParameterList& list_;
  BuildOptions options_;
  std::string prefix_;
};

}  // namespace kiln
