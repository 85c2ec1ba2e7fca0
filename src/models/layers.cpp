#include "models/layers.h"

#include <cmath>

#include "core/aten.h"
#include "ops/ops.h"

namespace kiln {

at::Tensor Linear::forward(const at::Tensor& x, at::ScalarType compute_dtype) const {
  return ops::linear(x, weight->value, bias ? std::optional(bias->value) : std::nullopt, compute_dtype);
}

at::Tensor Conv2d::forward(const at::Tensor& x, at::ScalarType compute_dtype) const {
  return at::conv2d(x.to(compute_dtype), weight->value.to(compute_dtype), bias->value.to(compute_dtype),
                    {stride, stride}, {padding, padding});
}

at::Tensor GroupNorm::forward(const at::Tensor& x, bool silu) const {
  return ops::group_norm_silu(x, num_groups, weight->value, bias->value, eps, silu);
}

namespace {

// On meta, and not from its allocator: a dry run counts what that gives.
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

Linear ParameterScope::linear(const std::string& name, int64_t in, int64_t out, Init weight_init) const {
  return {.weight = add(name + ".weight", {out, in}, std::move(weight_init)),
          .bias = add(name + ".bias", {out}, Init::zeros())};
}

Linear ParameterScope::uniform_linear(const std::string& name, int64_t in, int64_t out) const {
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in)));
  return {.weight = add(name + ".weight", {out, in}, init), .bias = add(name + ".bias", {out}, init)};
}

Conv2d ParameterScope::conv2d(const std::string& name, int64_t in, int64_t out, int64_t kernel,
                              int64_t stride, int64_t padding) const {
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(in * kernel * kernel)));
  return {.weight = add(name + ".weight", {out, in, kernel, kernel}, init),
          .bias = add(name + ".bias", {out}, init),
          .stride = stride,
          .padding = padding};
}

GroupNorm ParameterScope::group_norm(const std::string& name, int64_t channels, int64_t num_groups,
                                     double eps) const {
  return {.weight = add(name + ".weight", {channels}, Init::ones()),
          .bias = add(name + ".bias", {channels}, Init::zeros()),
          .num_groups = num_groups,
          .eps = eps};
}

}  // namespace kiln
