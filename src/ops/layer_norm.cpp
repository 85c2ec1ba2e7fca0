#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "ops/kernels.h"
#include "ops/matrix_products.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x, weight and bias in dtypes that ATen takes together. Its kernel for CUDA takes one dtype for all;
// statistics are f32 there as well.
struct LayerNormInputs {
  at::Tensor x, weight, bias;

  LayerNormInputs(const at::Tensor& x_in, const at::Tensor& weight_in, const at::Tensor& bias_in)
      : x(x_in.contiguous()) {
    const at::ScalarType dtype = computes_on_cuda(x) ? x.scalar_type() : at::kFloat;
    weight = weight_in.to(dtype).contiguous();
    bias = bias_in.to(dtype).contiguous();
  }
};

// The output in the dtype of x, and mean and reciprocal deviation in f32.
struct RowsAndMoments {
  at::Tensor out, mean, rstd;
};

RowsAndMoments normalise(const LayerNormInputs& in, double eps) {
  OpMark mark("kiln::layer_norm", in.x, in.weight, in.bias);
  auto [out, mean, rstd] = at::native_layer_norm(in.x, {in.x.size(-1)}, in.weight, in.bias, eps);
  mark.outputs(out);
  return {out, mean, rstd};
}

// The gradients of x, weight and bias that are `wanted`; those of weight and bias in `dtype`.
std::array<at::Tensor, 3> layer_norm_grads(const at::Tensor& grad_in, const LayerNormInputs& in,
                                           const at::Tensor& mean, const at::Tensor& rstd,
                                           at::ScalarType dtype, std::array<bool, 3> wanted) {
  const at::Tensor grad = grad_in.to(in.x.scalar_type()).contiguous();
  OpMark mark("kiln::layer_norm_backward", grad, in.x, in.weight);
  auto [grad_x, grad_weight, grad_bias] =
      at::native_layer_norm_backward(grad, in.x, {in.x.size(-1)}, mean, rstd, in.weight, in.bias, wanted);
  mark.outputs(grad_x, grad_weight, grad_bias);
  for (at::Tensor* of_affine : {&grad_weight, &grad_bias})
    if (of_affine->defined()) *of_affine = of_affine->to(dtype);
  return {grad_x, grad_weight, grad_bias};
}

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight_in,
                            const at::Tensor& bias_in, double eps, int64_t out_dtype) {
    const LayerNormInputs in(x_in, weight_in, bias_in);
    const RowsAndMoments normed = normalise(in, eps);
    ctx->save_for_backward({in.x, in.weight, in.bias, normed.mean, normed.rstd});
    ctx->saved_data["weight_dtype"] = static_cast<int64_t>(weight_in.scalar_type());
    return normed.out.to(static_cast<at::ScalarType>(out_dtype));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["weight_dtype"].toInt());
    const auto [grad_x, grad_weight, grad_bias] =
        layer_norm_grads(grads[0], LayerNormInputs(saved[0], saved[1], saved[2]), saved[3], saved[4], dtype,
                         {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)});
    return {grad_x, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
  }
};

// Linear layers of a normed x, as one product. Saves x and no copy of the weights.
struct NormedLinears : torch::autograd::Function<NormedLinears> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& norm_weight,
                            const at::Tensor& norm_bias, at::TensorList weights,
                            const std::optional<at::Tensor>& bias, double eps) {
    variable_list saved = {x, norm_weight, norm_bias, bias.value_or(at::Tensor())};
    saved.insert(saved.end(), weights.begin(), weights.end());
    ctx->save_for_backward(saved);
    ctx->saved_data["eps"] = eps;
    const at::Tensor normed = normalise(LayerNormInputs(x, norm_weight, norm_bias), eps).out;
    const at::Tensor weight = joined(weights);
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = weight.size(0);
    return affine(normed.to(weight.scalar_type()).view({-1, x.size(-1)}), weight, bias).view(shape);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    constexpr size_t kFirstWeight = 3;  // among the tensors that were given
    const variable_list saved = ctx->get_saved_variables();
    const at::TensorList weights = at::TensorList(saved).slice(kFirstWeight + 1);
    const at::Tensor &x = saved[0], &bias = saved[3], weight = joined(weights);
    const LayerNormInputs in(x, saved[1], saved[2]);
    const RowsAndMoments normed = normalise(in, ctx->saved_data["eps"].toDouble());
    const at::Tensor grad = grads[0].reshape({-1, weight.size(0)}).contiguous();
    LayerNeeds needs{.weight = false,
                     .bias = bias.defined() && ctx->needs_input_grad(kFirstWeight + weights.size())};
    for (size_t i = 0; i < weights.size(); ++i) needs.weight |= ctx->needs_input_grad(kFirstWeight + i);
    const AffineGrads of_layer = layer_grads(
        grad,
        [&] {
          return normed.out.to(weight.scalar_type()).view({-1, x.size(-1)});
        },
        weight, bias, needs);
    variable_list found(3);
    int64_t first = 0;
    for (const at::Tensor& each : weights) {
      // That of a single weight is the memory that was lent to it, not a view of that.
      const bool is_part = needs.weight && weights.size() > 1;
      found.push_back(is_part ? of_layer.weight.narrow(0, first, each.size(0)) : of_layer.weight);
      first += each.size(0);
    }
    found.insert(found.end(), {of_layer.bias, at::Tensor()});
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    if (wanted[0] || wanted[1] || wanted[2])
      std::ranges::move(layer_norm_grads(affine_grad_rows(grad, weight).view(x.sizes()), in, normed.mean,
                                         normed.rstd, saved[1].scalar_type(), wanted),
                        found.begin());
    return found;
  }

 private:
  static at::Tensor joined(at::TensorList weights) {
    return weights.size() == 1 ? weights[0] : at::cat(weights);
  }
};

}  // namespace

namespace reference {

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      at::ScalarType out_dtype) {
  const auto math = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor rows = x.to(math);
  const at::Tensor centred = rows - rows.mean(-1, /*keepdim=*/true);
  const at::Tensor rstd = (centred.square().mean(-1, /*keepdim=*/true) + eps).rsqrt();
  return (centred * rstd * weight.to(math) + bias.to(math)).to(out_dtype);
}

}  // namespace reference

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      at::ScalarType out_dtype) {
  if (x.dim() < 1 || weight.numel() != x.size(-1) || bias.numel() != x.size(-1))
    fail("layer_norm", "expected x (..., D), weight and bias (D), got {}, {} and {}",
         fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"), fmt::join(bias.sizes(), "x"));
  if (x.scalar_type() == at::kDouble || x.numel() == 0)
    return reference::layer_norm(x, weight, bias, eps, out_dtype);
  return LayerNorm::apply(x, weight, bias, eps, static_cast<int64_t>(out_dtype));
}

at::Tensor layer_norm_linears(const at::Tensor& x, const LayerNormLayer& norm,
                              const std::vector<at::Tensor>& weights, const std::optional<at::Tensor>& bias,
                              at::ScalarType compute_dtype) {
  std::vector<at::Tensor> cast;
  for (const at::Tensor& weight : weights) {
    if (weight.dim() != 2 || x.dim() < 1 || weight.size(1) != x.size(-1))
      fail("layer_norm_linears", "expected x (..., D) and weights (out, D), got {} and {}",
           fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
    cast.push_back(weight.to(compute_dtype));
  }
  if (x.scalar_type() == at::kDouble || x.numel() == 0)
    return linear(layer_norm(x, norm.weight, norm.bias, norm.eps, compute_dtype), at::cat(cast), bias,
                  compute_dtype);
  const std::optional<at::Tensor> cast_bias = bias ? std::optional(bias->to(compute_dtype)) : std::nullopt;
  return NormedLinears::apply(x, norm.weight, norm.bias, at::TensorList(cast), cast_bias, norm.eps);
}

}  // namespace kiln::ops
