#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "ops/gelu.h"
#include "ops/matrix_products.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

at::Tensor gelu_of(const at::Tensor& rows) {
  at::Tensor activation = at::empty_like(rows);
  gelu_tanh_forward(rows, activation);
  return activation;
}

// gelu alone. Saves its input.
struct GeluTanh : torch::autograd::Function<GeluTanh> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h) {
    ctx->save_for_backward({h});
    return gelu_of(h);
  }
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const at::Tensor h = ctx->get_saved_variables()[0];
    at::Tensor grad_h = at::empty_like(h);
    gelu_tanh_backward(grads[0].contiguous(), h, grad_h);
    return {grad_h};
  }
};

struct GeluTanhRows {
  static at::Tensor of(const at::Tensor& rows) { return gelu_of(rows); }
  static at::Tensor grad(at::Tensor grad, const at::Tensor& rows) {
    gelu_tanh_backward(grad, rows, grad);
    return grad;
  }
};

struct GegluRows {
  static at::Tensor of(const at::Tensor& rows) { return geglu_forward(rows); }
  static at::Tensor grad(const at::Tensor& grad, const at::Tensor& rows) {
    return geglu_backward(grad, rows);
  }
};

// Saves the input of the activation and computes that again in backward.
template <class Activation>
struct ActivatedLinear : torch::autograd::Function<ActivatedLinear<Activation>> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({h, weight, bias.value_or(at::Tensor())});
    std::vector<int64_t> shape = h.sizes().vec();
    shape.back() = weight.size(0);
    return affine(Activation::of(h.reshape({-1, h.size(-1)}).contiguous()), weight, bias).view(shape);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &h = saved[0], &weight = saved[1], &bias = saved[2];
    const at::Tensor rows = h.reshape({-1, h.size(-1)}).contiguous();
    const at::Tensor grad = grads[0].reshape({-1, weight.size(0)}).contiguous();
    const AffineGrads of_layer =
        layer_grads(grad, [&] { return Activation::of(rows); }, weight, bias,
                    {ctx->needs_input_grad(1), bias.defined() && ctx->needs_input_grad(2)});
    at::Tensor grad_h;
    if (ctx->needs_input_grad(0))
      grad_h = Activation::grad(affine_grad_rows(grad, weight), rows).view(h.sizes());
    return {grad_h, of_layer.weight, of_layer.bias};
  }
};

// Both layers of an MLP. Saves x, the input of gelu, and its result if OpChoices keep it.
struct GeluTanhMlp : torch::autograd::Function<GeluTanhMlp> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight_1,
                            const at::Tensor& bias_1, const at::Tensor& weight_2, const at::Tensor& bias_2) {
    const GeluResult inner = affine_gelu(x.reshape({-1, weight_1.size(1)}).contiguous(), weight_1, bias_1);
    // x is needed only for the gradient of the first weight.
    // Gelu's result likewise, for that of the second.
    const bool keeps = OpChoicesScope::current().keep_gelu && weight_2.requires_grad();
    ctx->save_for_backward({weight_1.requires_grad() ? x : at::Tensor(), inner.hidden, weight_1, bias_1,
                            weight_2, bias_2, keeps ? inner.activation : at::Tensor()});
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = weight_2.size(0);
    return affine(inner.activation, weight_2, bias_2).view(shape);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &hidden = saved[1], &weight_1 = saved[2], &bias_1 = saved[3],
                     &weight_2 = saved[4], &bias_2 = saved[5], &activation = saved[6];
    const at::Tensor grad = grads[0].reshape({-1, weight_2.size(0)}).contiguous();
    const auto gelu = [&] { return activation.defined() ? activation : gelu_of(hidden); };
    const AffineGrads outer =
        layer_grads(grad, gelu, weight_2, bias_2, {ctx->needs_input_grad(3), ctx->needs_input_grad(4)});
    at::Tensor bias_memory, grad_x;
    AffineGrads inner;
    if (ctx->needs_input_grad(2)) bias_memory = take_gradient_memory(bias_1, grad.scalar_type());
    const HiddenGrads of_hidden = affine_grad_rows_gelu(grad, weight_2, hidden, bias_memory);
    if (ctx->needs_input_grad(2)) inner.bias = of_hidden.bias;
    if (ctx->needs_input_grad(1))
      inner.weight = affine_grad_weight(of_hidden.hidden, x.reshape({-1, weight_1.size(1)}),
                                        take_gradient_memory(weight_1, grad.scalar_type()));
    if (ctx->needs_input_grad(0)) {
      std::vector<int64_t> shape = grads[0].sizes().vec();
      shape.back() = weight_1.size(1);
      grad_x = affine_grad_rows(of_hidden.hidden, weight_1).view(shape);
    }
    return {grad_x, inner.weight, inner.bias, outer.weight, outer.bias};
  }
};

// Throws unless the weights (out, in) and their biases fit behind x (..., in).
void check_mlp(const at::Tensor& x, const MlpWeights& w) {
  const bool fits = w.weight_1.dim() == 2 && w.weight_2.dim() == 2 && x.dim() >= 1 &&
                    x.size(-1) == w.weight_1.size(1) && w.weight_2.size(1) == w.weight_1.size(0) &&
                    w.bias_1.sizes() == at::IntArrayRef{w.weight_1.size(0)} &&
                    w.bias_2.sizes() == at::IntArrayRef{w.weight_2.size(0)};
  if (!fits)
    fail("gelu_tanh_mlp",
         "expected x (..., in), weights (hidden, in) and (out, hidden) and their biases, got {}, "
         "{} and {}",
         fmt::join(x.sizes(), "x"), fmt::join(w.weight_1.sizes(), "x"), fmt::join(w.weight_2.sizes(), "x"));
}

}  // namespace

at::Tensor gelu_tanh(const at::Tensor& h) { return GeluTanh::apply(h.contiguous()); }

namespace reference {

at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::ScalarType compute_dtype) {
  return linear(at::gelu(h.to(compute_dtype), "tanh"), weight, bias, compute_dtype);
}

}  // namespace reference

at::Tensor gelu_tanh_linear(const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, at::ScalarType compute_dtype) {
  if (weight.dim() != 2 || h.dim() < 1 || h.size(-1) != weight.size(1))
    fail("gelu_tanh_linear", "expected h (..., in) and weight (out, in), got {} and {}",
         fmt::join(h.sizes(), "x"), fmt::join(weight.sizes(), "x"));
  std::optional<at::Tensor> cast_bias;
  if (bias) cast_bias = bias->to(compute_dtype);
  return ActivatedLinear<GeluTanhRows>::apply(h.to(compute_dtype), weight.to(compute_dtype), cast_bias);
}

at::Tensor geglu_linear(const at::Tensor& h, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        at::ScalarType compute_dtype) {
  if (weight.dim() != 2 || h.dim() < 1 || h.size(-1) != 2 * weight.size(1))
    fail("geglu_linear", "expected h (..., 2F) and weight (out, F), got {} and {}", fmt::join(h.sizes(), "x"),
         fmt::join(weight.sizes(), "x"));
  std::optional<at::Tensor> cast_bias;
  if (bias) cast_bias = bias->to(compute_dtype);
  return ActivatedLinear<GegluRows>::apply(h.to(compute_dtype), weight.to(compute_dtype), cast_bias);
}

at::Tensor gelu_tanh_mlp(const at::Tensor& x, const MlpWeights& weights, at::ScalarType compute_dtype,
                         Products products) {
  check_mlp(x, weights);
  const auto cast = [compute_dtype](const at::Tensor& tensor) { return tensor.to(compute_dtype); };
  const MlpWeights w{cast(weights.weight_1), cast(weights.bias_1), cast(weights.weight_2),
                     cast(weights.bias_2)};
  if (products == Products::kFp8) {
    // fp8 products have no epilogues. The second layer saves gelu's result in 8 bits.
    at::Tensor hidden = linear(x, w.weight_1, w.bias_1, compute_dtype, products);
    return linear(gelu_tanh(hidden), w.weight_2, w.bias_2, compute_dtype, products);
  }
  return GeluTanhMlp::apply(cast(x), w.weight_1, w.bias_1, w.weight_2, w.bias_2);
}

}  // namespace kiln::ops
