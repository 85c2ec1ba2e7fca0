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

struct GeluTanhLinear : torch::autograd::Function<GeluTanhLinear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({h, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    std::vector<int64_t> shape = h.sizes().vec();
    shape.back() = weight.size(0);
    return affine(gelu_of(h.reshape({-1, weight.size(1)}).contiguous()), weight, bias).view(shape);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &h = saved[0], &weight = saved[1];
    const at::Tensor rows = h.reshape({-1, weight.size(1)}).contiguous();
    const at::Tensor grad = grads[0].reshape({-1, weight.size(0)}).contiguous();
    at::Tensor grad_h, grad_weight, grad_bias;
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) grad_bias = affine_grad_bias(grad);
    if (ctx->needs_input_grad(1)) grad_weight = affine_grad_weight(grad, gelu_of(rows));
    if (ctx->needs_input_grad(0)) {
      at::Tensor grad_rows = affine_grad_rows(grad, weight);
      gelu_tanh_backward(grad_rows, rows, grad_rows);
      grad_h = grad_rows.view(h.sizes());
    }
    return {grad_h, grad_weight, grad_bias};
  }
};

}  // namespace

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
  return GeluTanhLinear::apply(h.to(compute_dtype), weight.to(compute_dtype), cast_bias);
}

}  // namespace kiln::ops
