#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/error.h"
#include "ops/kernels.h"
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

struct LayerNorm : torch::autograd::Function<LayerNorm> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x_in, const at::Tensor& weight_in,
                            const at::Tensor& bias_in, double eps, int64_t out_dtype) {
    const LayerNormInputs in(x_in, weight_in, bias_in);
    OpMark mark("kiln::layer_norm", in.x, in.weight, in.bias);
    // The output in the dtype of x, and mean and reciprocal deviation in f32.
    auto [out, mean, rstd] = at::native_layer_norm(in.x, {in.x.size(-1)}, in.weight, in.bias, eps);
    mark.outputs(out);
    ctx->save_for_backward({in.x, in.weight, in.bias, mean, rstd});
    ctx->saved_data["weight_dtype"] = static_cast<int64_t>(weight_in.scalar_type());
    return out.to(static_cast<at::ScalarType>(out_dtype));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2], &mean = saved[3], &rstd = saved[4];
    const at::Tensor grad = grads[0].to(x.scalar_type()).contiguous();
    OpMark mark("kiln::layer_norm_backward", grad, x, weight);
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    auto [grad_x, grad_weight, grad_bias] =
        at::native_layer_norm_backward(grad, x, {x.size(-1)}, mean, rstd, weight, bias, wanted);
    mark.outputs(grad_x, grad_weight, grad_bias);
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["weight_dtype"].toInt());
    for (at::Tensor* grad_affine : {&grad_weight, &grad_bias})
      if (grad_affine->defined()) *grad_affine = grad_affine->to(dtype);
    return {grad_x, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
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

}  // namespace kiln::ops
