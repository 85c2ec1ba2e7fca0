#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>
#include <algorithm>

#include "core/aten.h"
#include "core/error.h"
#include "ops/fp8.h"
#include "ops/kernels.h"
#include "ops/matrix_products.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

std::vector<int64_t> result_shape(const at::Tensor& x, const at::Tensor& weight) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  return shape;
}

// at::linear with its autograd, a faster bias sum, and fp16 as storage on a CPU.
struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    // The input is needed only for the gradient of the weight.
    ctx->save_for_backward({weight.requires_grad() ? x : at::Tensor(), weight, bias.value_or(at::Tensor())});
    return affine(x.reshape({-1, weight.size(1)}), weight, bias).view(result_shape(x, weight));
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const at::Tensor grad = grads[0].reshape({-1, weight.size(0)}).contiguous();
    at::Tensor grad_x;
    if (ctx->needs_input_grad(0)) {
      std::vector<int64_t> shape = grads[0].sizes().vec();
      shape.back() = weight.size(1);
      grad_x = affine_grad_rows(grad, weight).view(shape);
    }
    const AffineGrads of_layer =
        layer_grads(grad,
                    [&] {
                      return x.reshape({-1, weight.size(1)});
                    },
                    weight, bias, {ctx->needs_input_grad(1), bias.defined() && ctx->needs_input_grad(2)});
    return {grad_x, of_layer.weight, of_layer.bias};
  }
};

// The same with products in fp8, for bf16 operands. Saves x in 8 bits, which is half its bytes.
struct Fp8Linear : torch::autograd::Function<Fp8Linear> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias) {
    const Fp8Tensor rows =
        to_fp8(x.reshape({-1, weight.size(1)}).contiguous(), at::kFloat8_e4m3fn, Fp8Layout::kBoth);
    ctx->save_for_backward({rows.transposed, rows.scale, weight, bias.value_or(at::Tensor())});
    ctx->saved_data["shape"] = x.sizes().vec();
    return fp8_affine(rows, weight, bias).view(result_shape(x, weight));
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Fp8Tensor rows{.values = {}, .transposed = saved[0], .scale = saved[1]};
    const at::Tensor &weight = saved[2], &bias = saved[3];
    const at::Tensor wide = grads[0].reshape({-1, weight.size(0)}).contiguous();
    const Fp8Tensor grad = to_fp8(wide, at::kFloat8_e5m2, Fp8Layout::kBoth);
    at::Tensor grad_x, grad_weight;
    if (ctx->needs_input_grad(0))
      grad_x = fp8_affine_grad_rows(grad, weight).view(ctx->saved_data["shape"].toIntVector());
    if (ctx->needs_input_grad(1))
      grad_weight = fp8_affine_grad_weight(grad, rows, take_gradient_memory(weight, at::kBFloat16));
    const AffineGrads of_bias = layer_grads(wide, [] { return at::Tensor(); }, weight, bias,
                                            {/*weight=*/false, bias.defined() && ctx->needs_input_grad(2)});
    return {grad_x, grad_weight, of_bias.bias};
  }
};

}  // namespace

namespace reference {

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype) {
  const at::ScalarType dtype = product_dtype(x.device(), compute_dtype);
  at::Tensor y = at::matmul(x.to(compute_dtype).to(dtype), weight.to(compute_dtype).to(dtype).t());
  if (bias) y = y + bias->to(compute_dtype).to(dtype);
  return y.to(compute_dtype);
}

}  // namespace reference

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::ScalarType compute_dtype, Products products) {
  if (weight.dim() != 2 || x.dim() < 1 || x.size(-1) != weight.size(1))
    fail("linear", "expected x (..., in) and weight (out, in), got {} and {}", fmt::join(x.sizes(), "x"),
         fmt::join(weight.sizes(), "x"));
  std::optional<at::Tensor> cast_bias;
  if (bias) cast_bias = bias->to(compute_dtype);
  const bool in_fp8 = products == Products::kFp8 && compute_dtype == at::kBFloat16 &&
                      is_fp8_layer(x.numel() / std::max<int64_t>(x.size(-1), 1), weight);
  if (in_fp8) return Fp8Linear::apply(x.to(compute_dtype), weight.to(compute_dtype), cast_bias);
  return Linear::apply(x.to(compute_dtype), weight.to(compute_dtype), cast_bias);
}

}  // namespace kiln::ops
