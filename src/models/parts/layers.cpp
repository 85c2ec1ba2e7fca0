#include "models/parts/layers.h"

#include <cmath>

#include "core/aten.h"
#include "models/parts/adapter_dropout.h"
#include "ops/ops.h"

namespace kiln {
namespace {

std::optional<at::Tensor> value_of(const std::shared_ptr<Parameter>& parameter) {
  return parameter ? std::optional(parameter->value) : std::nullopt;
}

// Adds `change` to a slice of `out` in dimension `dim`: from `first` on, as wide as `change`.
at::Tensor add_rows(const at::Tensor& out, const at::Tensor& change, int64_t first, int64_t dim) {
  const int64_t size = change.size(dim), total = out.size(dim);
  if (size == total) return out + change;
  std::vector<int64_t> padding(2 * (out.dim() - dim), 0);
  padding[padding.size() - 2] = first;
  padding[padding.size() - 1] = total - first - size;
  return out + at::constant_pad_nd(change, padding);
}

// Adds the outputs of a weight's adapters to `out` (..., rows), where the layer's rows begin at `offset`.
at::Tensor add_adapters(at::Tensor out, const Parameter& weight, const at::Tensor& x, int64_t offset,
                        at::ScalarType compute_dtype) {
  for (const Adapter& adapter : weight.adapters) {
    const at::Tensor low =
        ops::linear(with_dropout(x, adapter), adapter.down->value.flatten(1), std::nullopt, compute_dtype);
    const at::Tensor change =
        ops::linear(low * adapter.scale, adapter.up->value.flatten(1), std::nullopt, compute_dtype);
    out = add_rows(out, change, offset + adapter.first_row, out.dim() - 1);
  }
  return out;
}

}  // namespace

at::Tensor Linear::forward(const at::Tensor& x, at::ScalarType compute_dtype) const {
  return add_adapters(ops::linear(x, weight->value, value_of(bias), compute_dtype, products), *weight, x, 0,
                      compute_dtype);
}

at::Tensor Linear::forward_gelu_tanh(const at::Tensor& h, at::ScalarType compute_dtype) const {
  if (!weight->adapters.empty()) return forward(ops::gelu_tanh(h.to(compute_dtype)), compute_dtype);
  return ops::gelu_tanh_linear(h, weight->value, value_of(bias), compute_dtype);
}

at::Tensor Linear::forward_geglu(const at::Tensor& h, at::ScalarType compute_dtype) const {
  if (!weight->adapters.empty() || products == ops::Products::kFp8)
    return forward(ops::geglu(h), compute_dtype);
  return ops::geglu_linear(h, weight->value, value_of(bias), compute_dtype);
}

at::Tensor gelu_tanh_mlp(const Linear& fc1, const Linear& fc2, const at::Tensor& x,
                         at::ScalarType compute_dtype) {
  if (!fc1.weight->adapters.empty() || !fc2.weight->adapters.empty())
    return fc2.forward_gelu_tanh(fc1.forward(x, compute_dtype), compute_dtype);
  return ops::gelu_tanh_mlp(x, {fc1.weight->value, fc1.bias->value, fc2.weight->value, fc2.bias->value},
                            compute_dtype, fc1.products);
}

at::Tensor Conv2d::forward(const at::Tensor& x, at::ScalarType compute_dtype) const {
  at::Tensor out = ops::conv2d(x, weight->value, value_of(bias), shape, compute_dtype);
  for (const Adapter& adapter : weight->adapters) {
    const at::Tensor low =
        ops::conv2d(with_dropout(x, adapter), adapter.down->value, std::nullopt, shape, compute_dtype);
    const at::Tensor change =
        ops::conv2d(low * adapter.scale, adapter.up->value, std::nullopt, {}, compute_dtype);
    out = add_rows(out, change, adapter.first_row, 1);
  }
  return out;
}

at::Tensor Conv2d::forward_normed(const GroupNorm& norm, bool silu, const at::Tensor& x,
                                  at::ScalarType compute_dtype) const {
  if (!weight->adapters.empty()) return forward(norm.forward(x, silu), compute_dtype);
  return ops::group_norm_conv2d(x, {norm.weight->value, norm.bias->value, norm.num_groups, norm.eps, silu},
                                weight->value, value_of(bias), shape, compute_dtype);
}

at::Tensor Conv2d::forward_rows(const at::Tensor& x, at::ScalarType compute_dtype) const {
  return add_adapters(ops::linear(x, weight->value.flatten(1), value_of(bias), compute_dtype), *weight, x, 0,
                      compute_dtype);
}

at::Tensor GroupNorm::forward(const at::Tensor& x, bool silu) const {
  return ops::group_norm_silu(x, num_groups, weight->value, bias->value, eps, silu);
}

at::Tensor LayerNorm::forward(const at::Tensor& x, at::ScalarType compute_dtype) const {
  return ops::layer_norm(x, weight->value, bias->value, eps, compute_dtype);
}

at::Tensor RmsNorm::forward(const at::Tensor& x, at::ScalarType out_dtype) const {
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor scaled = wide * (wide.square().mean(-1, /*keepdim=*/true) + eps).rsqrt();
  return (scaled * weight->value.to(at::kFloat)).to(out_dtype);
}

at::Tensor joined_linears(std::initializer_list<const Linear*> layers, const at::Tensor& x,
                          at::ScalarType compute_dtype) {
  std::vector<at::Tensor> weights, biases;
  for (const Linear* layer : layers) {
    weights.push_back(layer->weight->value.to(compute_dtype));
    if (layer->bias) biases.push_back(layer->bias->value.to(compute_dtype));
  }
  std::optional<at::Tensor> bias;
  if (!biases.empty()) bias = at::cat(biases);
  at::Tensor out = ops::linear(x, at::cat(weights), bias, compute_dtype);
  int64_t offset = 0;
  for (const Linear* layer : layers) {
    out = add_adapters(out, *layer->weight, x, offset, compute_dtype);
    offset += layer->weight->value.size(0);
  }
  return out;
}

at::Tensor normed_linears(const LayerNorm& norm, std::initializer_list<const Linear*> layers,
                          const at::Tensor& x, at::ScalarType compute_dtype) {
  std::vector<at::Tensor> weights, biases;
  bool is_plain = true;
  for (const Linear* layer : layers) {
    is_plain &= layer->weight->adapters.empty() && layer->products == ops::Products::kComputeDtype;
    weights.push_back(layer->weight->value);
    if (layer->bias) biases.push_back(layer->bias->value);
  }
  if (!is_plain) {
    const at::Tensor rows = norm.forward(x, compute_dtype);
    return layers.size() == 1 ? (*layers.begin())->forward(rows, compute_dtype)
                              : joined_linears(layers, rows, compute_dtype);
  }
  std::optional<at::Tensor> bias;
  if (!biases.empty()) bias = biases.size() == 1 ? biases[0] : at::cat(biases);
  return ops::layer_norm_linears(x, {norm.weight->value, norm.bias->value, norm.eps}, weights, bias,
                                 compute_dtype);
}

namespace {

// Makes a tensor on meta without its allocator, whose allocations a dry run counts.
at::Tensor outline_of(at::IntArrayRef shape) {
  return at::for_blob(nullptr, shape)
      .options(at::TensorOptions(at::kMeta).dtype(at::kFloat))
      .target_device(at::kMeta)
      .make_tensor();
}

}  // namespace

ParameterScope::ParameterScope(ParameterList& list, const BuildOptions& options, std::string prefix)
    : list_(list), options_(options), prefix_(std::move(prefix)) {}

ParameterScope ParameterScope::under(const std::string& name) const {
  return ParameterScope(list_, options_, prefix_ + name + ".");
}

std::shared_ptr<Parameter> ParameterScope::add(const std::string& name, at::IntArrayRef shape, Init init,
                                               bool trainable) const {
  const at::Tensor value = options_.outline
                               ? outline_of(shape)
                               : at::empty(shape, at::TensorOptions(at::kFloat).device(options_.device));
  auto parameter = std::make_shared<Parameter>(
      Parameter{.key = prefix_ + name, .value = value, .init = std::move(init), .trainable = trainable});
  list_.push_back(parameter);
  return parameter;
}

std::shared_ptr<Parameter> ParameterScope::add_adaptable(const std::string& name, at::IntArrayRef shape,
                                                         Init init) const {
  auto parameter = add(name, shape, std::move(init));
  parameter->adaptable = true;
  return parameter;
}

Linear ParameterScope::linear(const std::string& name, int64_t in, int64_t out, Init weight_init) const {
  return {.weight = add_adaptable(name + ".weight", {out, in}, std::move(weight_init)),
          .bias = add(name + ".bias", {out}, Init::zeros()),
          .products = options_.products};
}

Linear ParameterScope::uniform_linear(const std::string& name, int64_t in, int64_t out, bool has_bias) const {
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in)));
  return {.weight = add_adaptable(name + ".weight", {out, in}, init),
          .bias = has_bias ? add(name + ".bias", {out}, init) : nullptr,
          .products = options_.products};
}

Conv2d ParameterScope::conv2d(const std::string& name, int64_t in, int64_t out, int64_t kernel,
                              int64_t stride, int64_t padding) const {
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in * kernel * kernel)));
  return {.weight = add_adaptable(name + ".weight", {out, in, kernel, kernel}, init),
          .bias = add(name + ".bias", {out}, init),
          .shape = {.stride = stride, .padding = padding}};
}

Conv2d ParameterScope::pointwise_conv2d(const std::string& name, int64_t in, int64_t out, Init weight_init,
                                        bool has_bias) const {
  return {.weight = add_adaptable(name + ".weight", {out, in, 1, 1}, std::move(weight_init)),
          .bias = has_bias ? add(name + ".bias", {out}, Init::zeros()) : nullptr};
}

Conv2d ParameterScope::grouped_conv2d(const std::string& name, int64_t channels, int64_t kernel,
                                      int64_t groups, bool has_bias) const {
  const int64_t in = channels / groups;
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in * kernel * kernel)));
  return {.weight = add(name + ".weight", {channels, in, kernel, kernel}, init),
          .bias = has_bias ? add(name + ".bias", {channels}, init) : nullptr,
          .shape = {.padding = kernel / 2, .groups = groups}};
}

GroupNorm ParameterScope::group_norm(const std::string& name, int64_t channels, int64_t num_groups,
                                     double eps) const {
  return {.weight = add(name + ".weight", {channels}, Init::ones()),
          .bias = add(name + ".bias", {channels}, Init::zeros()),
          .num_groups = num_groups,
          .eps = eps};
}

LayerNorm ParameterScope::layer_norm(const std::string& name, int64_t width, double eps) const {
  return {.weight = add(name + ".weight", {width}, Init::ones()),
          .bias = add(name + ".bias", {width}, Init::zeros()),
          .eps = eps};
}

}  // namespace kiln
