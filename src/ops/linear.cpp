#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "ops/matrix_products.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Autograd of at::linear, with the fast bias sum and fp16 kept as storage.
struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = weight.size(0);
    return affine(x.reshape({-1, weight.size(1)}), weight, bias).view(shape);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor grad = grads[0].reshape({-1, weight.size(0)}).contiguous();
    at::Tensor grad_x, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) grad_x = affine_grad_rows(grad, weight).view(x.sizes());
    if (ctx->needs_input_grad(1)) grad_weight = affine_grad_weight(grad, x.reshape({-1, weight.size(1)}));
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) grad_bias = affine_grad_bias(grad);
    return {grad_x, grad_weight, grad_bias};
  }
};

}  // namespace

namespace reference {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype) {
  const bool upcast = compute_dtype == at::kHalf && x.device().is_cpu();
  const at::ScalarType dtype = upcast ? at::kFloat : compute_dtype;
  at::Tensor y = at::matmul(x.to(compute_dtype).to(dtype), weight.to(compute_dtype).to(dtype).t());
  if (bias) y = y + bias->to(compute_dtype).to(dtype);
  return y.to(compute_dtype);
}

}  // namespace reference

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype) {
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1))
    fail("linear", "expected x (..., in) and weight (out, in), got {} and {}", fmt::join(x.sizes(), "x"),
         fmt::join(weight.sizes(), "x"));
  std::optional<at::Tensor> cast_bias;
  if (bias) cast_bias = bias->to(compute_dtype);
  return Linear::apply(x.to(compute_dtype), weight.to(compute_dtype), cast_bias);
}

}  // namespace kiln::ops
