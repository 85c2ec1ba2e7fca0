// Convolutions are those of oneDNN and cuDNN. Kiln adds 16-bit storage on CPUs that multiply in f32, frozen
// convolutions that do not keep their input, and those of dry runs (ops/planned/aten.cpp).
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include "core/aten.h"
#include "core/error.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

// Keeps its operands for backward in the dtype that they are stored in, not in the one that is multiplied; of
// a weight and bias that are not trained, it does not keep the input.
struct StoredConvolution : torch::autograd::Function<StoredConvolution> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const at::Tensor& bias, const ConvolutionShape& shape,
                            bool is_frozen) {
    const at::ScalarType dtype = product_dtype(x.device(), x.scalar_type());
    ctx->save_for_backward({is_frozen ? at::Tensor() : x, weight});
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->saved_data["shape"] = std::vector<int64_t>{shape.stride, shape.padding, shape.groups};
    ctx->saved_data["has_bias"] = bias.defined();
    return at::conv2d(x.to(dtype), weight.to(dtype),
                      bias.defined() ? std::optional(bias.to(dtype)) : std::nullopt,
                      {shape.stride, shape.stride}, {shape.padding, shape.padding}, {1, 1}, shape.groups)
        .to(x.scalar_type());
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::ScalarType stored = saved[1].scalar_type(), dtype = product_dtype(saved[1].device(), stored);
    const at::Tensor weight = saved[1].to(dtype), grad = grads[0].to(dtype);
    const std::vector<int64_t> shape = ctx->saved_data["shape"].toIntVector();
    // Without the input, its gradient needs only the shape: the values are not read.
    const at::Tensor x = saved[0].defined() ? saved[0].to(dtype)
                                            : at::empty(ctx->saved_data["sizes"].toIntVector(),
                                                        grad.options(), convolution_format(grad, weight));
    const bool is_frozen = !saved[0].defined(), has_bias = ctx->saved_data["has_bias"].toBool();
    const int64_t num_out[] = {weight.size(0)};
    const auto [grad_x, grad_weight, grad_bias] = at::convolution_backward(
        grad, x, weight, has_bias ? at::OptionalIntArrayRef(num_out) : at::OptionalIntArrayRef(),
        {shape[0], shape[0]}, {shape[1], shape[1]}, {1, 1},
        /*transposed=*/false, {0, 0}, shape[2],
        {ctx->needs_input_grad(0), !is_frozen && ctx->needs_input_grad(1),
         !is_frozen && has_bias && ctx->needs_input_grad(2)});
    const auto as_stored = [&](const at::Tensor& gradient) {
      return gradient.defined() ? gradient.to(stored) : gradient;
    };
    return {as_stored(grad_x), as_stored(grad_weight), as_stored(grad_bias), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::MemoryFormat convolution_format(const at::Tensor& x, const at::Tensor& weight) {
  const auto channels_last = at::MemoryFormat::ChannelsLast;
  const bool is_channels_last =
      x.suggest_memory_format() == channels_last || weight.suggest_memory_format() == channels_last;
  return is_channels_last ? channels_last : at::MemoryFormat::Contiguous;
}

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const ConvolutionShape& shape, at::ScalarType compute_dtype) {
  if (x.dim() != 4 || weight.dim() != 4 || x.size(1) != weight.size(1) * shape.groups)
    fail("conv2d", "expected x (B, C, H, W) and weight (out, C / {}, k, k), got {} and {}", shape.groups,
         fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
  const auto cast = [&](const at::Tensor& tensor) { return tensor.to(compute_dtype); };
  const at::Tensor cast_bias = bias ? cast(*bias) : at::Tensor();
  const bool is_frozen = !weight.requires_grad() && !(bias && bias->requires_grad());
  const bool may_drop_input = is_frozen && x.requires_grad() && at::GradMode::is_enabled();
  if (!may_drop_input && product_dtype(x.device(), compute_dtype) == compute_dtype)
    return at::conv2d(cast(x), cast(weight), bias ? std::optional(cast_bias) : std::nullopt,
                      {shape.stride, shape.stride}, {shape.padding, shape.padding}, {1, 1}, shape.groups);
  return StoredConvolution::apply(cast(x), cast(weight), cast_bias, shape, is_frozen);
}

}  // namespace kiln::ops
