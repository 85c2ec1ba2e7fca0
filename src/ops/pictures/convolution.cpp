// Convolutions are those of oneDNN and cuDNN. Kiln adds 16-bit storage on CPUs that multiply in f32, frozen
// convolutions that do not keep their input, those that normalise it again, 3x3 kernels on a CPU where its
// own are faster (ops/pictures/convolution.h), and the convolutions of dry runs (ops/planned/aten.cpp).
#include "ops/pictures/convolution.h"

#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "core/aten.h"
#include "core/error.h"
#include "ops/kernels.h"
#include "ops/matrix_products.h"
#include "ops/ops.h"
#include "ops/pictures/group_norm.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct ConvolutionGrads {
  at::Tensor x, weight, bias;
};

// The gradients that are `wanted`. `x` (of `sizes` in `format`) may be undefined if those of weight and bias
// are not.
ConvolutionGrads convolution_grads(const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef sizes,
                                   at::MemoryFormat format, const at::Tensor& weight, const at::Tensor& bias,
                                   const ConvolutionShape& shape, std::array<bool, 3> wanted) {
  ConvolutionGrads found;
  if (wanted[1] && has_conv_grad_weight(x, weight, shape)) {
    found.weight = conv_grad_weight(grad, x, weight, shape);
    if (wanted[2]) {
      const at::Tensor pixels = grad.permute({0, 2, 3, 1}).reshape({-1, weight.size(0)});
      found.bias = affine_grad_bias(pixels, take_gradient_memory(bias, weight.scalar_type()));
    }
    wanted = {wanted[0], false, false};
  }
  const at::ScalarType stored = weight.scalar_type(), dtype = product_dtype(weight.device(), stored);
  if (wanted[0] && has_conv_grad_x(dtype, grad, sizes, format, weight, shape)) {
    found.x = conv_grad_x(grad.to(dtype), sizes, weight.to(dtype), shape).to(stored);
    wanted[0] = false;
  }
  if (!wanted[0] && !wanted[1] && !wanted[2]) return found;
  const at::Tensor wide_grad = grad.to(dtype), wide_weight = weight.to(dtype);
  // Without the input, its gradient needs only the shape: the values are not read.
  const bool has_input = x.defined() && (wanted[1] || wanted[2] || stored == dtype);
  const at::Tensor wide_x = has_input ? x.to(dtype) : at::empty(sizes, wide_grad.options(), format);
  const int64_t num_out[] = {weight.size(0)};
  const auto [grad_x, grad_weight, grad_bias] =
      at::convolution_backward(wide_grad, wide_x, wide_weight,
                               bias.defined() ? at::OptionalIntArrayRef(num_out) : at::OptionalIntArrayRef(),
                               {shape.stride, shape.stride}, {shape.padding, shape.padding}, {1, 1},
                               /*transposed=*/false, {0, 0}, shape.groups, wanted);
  if (wanted[0]) found.x = grad_x.to(stored);
  if (wanted[1]) found.weight = grad_weight.to(stored);
  if (wanted[2]) found.bias = grad_bias.to(stored);
  return found;
}

// conv2d without autograd, of operands of one dtype.
at::Tensor convolve(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                    const ConvolutionShape& shape) {
  if (has_conv_forward(x, weight, shape)) return conv_forward(x, weight, bias, shape);
  return at::conv2d(x, weight, bias, {shape.stride, shape.stride}, {shape.padding, shape.padding}, {1, 1},
                    shape.groups);
}

std::optional<at::Tensor> cast_or_none(const std::optional<at::Tensor>& tensor, at::ScalarType dtype) {
  return tensor ? std::optional(tensor->to(dtype)) : std::nullopt;
}

// Keeps its operands for backward in the dtype that they are stored in, not in the one that is multiplied;
// the input as it was before a norm, where there is one; and none for a weight and bias that are not trained.
struct Convolution : torch::autograd::Function<Convolution> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias,
                            const std::optional<at::Tensor>& norm_weight,
                            const std::optional<at::Tensor>& norm_bias, const ConvolutionShape& shape,
                            int64_t num_groups, double eps, bool silu) {
    const bool is_trained = weight.requires_grad() || (bias && bias->requires_grad());
    const bool has_norm = norm_weight.has_value();
    ctx->saved_data["is_trained"] = is_trained;
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->saved_data["format"] = static_cast<int64_t>(convolution_format(x, weight));
    ctx->saved_data["shape"] = std::vector<int64_t>{shape.stride, shape.padding, shape.groups};
    ctx->saved_data["num_groups"] = num_groups;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["silu"] = silu;
    const at::ScalarType stored = weight.scalar_type(), dtype = product_dtype(x.device(), stored);
    GroupNormed normed;
    if (has_norm) normed = group_norm_forward(x, norm_of(ctx, *norm_weight, *norm_bias));
    const at::Tensor input = has_norm ? normed.out.to(stored) : x;
    normed.out.reset();
    const at::Tensor none;
    ctx->save_for_backward({is_trained || has_norm ? x : none, weight, bias.value_or(none),
                            norm_weight.value_or(none), norm_bias.value_or(none), normed.statistics.mean,
                            normed.statistics.rstd});
    return convolve(input.to(dtype), weight.to(dtype), cast_or_none(bias, dtype), shape).to(stored);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const std::vector<int64_t> shape = ctx->saved_data["shape"].toIntVector();
    const std::vector<int64_t> sizes = ctx->saved_data["sizes"].toIntVector();
    const bool has_norm = saved[3].defined(), is_trained = ctx->saved_data["is_trained"].toBool();
    // Indices count the tensors that were given.
    const size_t norm_at = bias.defined() ? 3 : 2;
    const std::array<bool, 3> of_norm = {ctx->needs_input_grad(0), has_norm && ctx->needs_input_grad(norm_at),
                                         has_norm && ctx->needs_input_grad(norm_at + 1)};
    const GroupNormLayer norm = norm_of(ctx, saved[3], saved[4]);
    at::Tensor input;
    if (is_trained) input = has_norm ? group_norm_forward(x, norm).out.to(weight.scalar_type()) : x;
    const ConvolutionGrads found = convolution_grads(
        grads[0], input, sizes, static_cast<at::MemoryFormat>(ctx->saved_data["format"].toInt()), weight,
        bias, {shape[0], shape[1], shape[2]},
        {of_norm[0] || of_norm[1] || of_norm[2], ctx->needs_input_grad(1),
         bias.defined() && ctx->needs_input_grad(2)});
    input.reset();
    const at::Tensor none;
    if (!has_norm || !found.x.defined())
      return {found.x, found.weight, found.bias, none, none, none, none, none, none};
    const GroupNormGrads outer =
        group_norm_backward(found.x, x, norm, {.mean = saved[5], .rstd = saved[6]}, of_norm);
    return {outer.x, found.weight, found.bias, outer.weight, outer.bias, none, none, none, none};
  }

 private:
  static GroupNormLayer norm_of(AutogradContext* ctx, const at::Tensor& weight, const at::Tensor& bias) {
    return {.weight = weight,
            .bias = bias,
            .num_groups = ctx->saved_data["num_groups"].toInt(),
            .eps = ctx->saved_data["eps"].toDouble(),
            .silu = ctx->saved_data["silu"].toBool()};
  }
};

void check_convolution(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape) {
  if (x.dim() != 4 || weight.dim() != 4 || x.size(1) != weight.size(1) * shape.groups)
    fail("conv2d", "expected x (B, C, H, W) and weight (out, C / {}, k, k), got {} and {}", shape.groups,
         fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
}

}  // namespace

at::MemoryFormat convolution_format(const at::Tensor& x, const at::Tensor& weight) {
  const auto channels_last = at::MemoryFormat::ChannelsLast;
  const bool is_channels_last =
      x.suggest_memory_format() == channels_last || weight.suggest_memory_format() == channels_last;
  return is_channels_last ? channels_last : at::MemoryFormat::Contiguous;
}

at::Tensor conv2d(const at::Tensor& x_in, const at::Tensor& weight_in,
                  const std::optional<at::Tensor>& bias_in, const ConvolutionShape& shape,
                  at::ScalarType compute_dtype) {
  check_convolution(x_in, weight_in, shape);
  const at::Tensor x = x_in.to(compute_dtype), weight = weight_in.to(compute_dtype);
  const std::optional<at::Tensor> bias = cast_or_none(bias_in, compute_dtype);
  const bool has_graph = at::GradMode::is_enabled();
  const bool is_frozen = !weight.requires_grad() && !(bias && bias->requires_grad());
  const bool may_drop_input = is_frozen && x.requires_grad() && has_graph;
  const bool has_own_part =
      has_conv_forward(x, weight, shape) ||
      (has_graph && weight.requires_grad() && has_conv_grad_weight(x, weight, shape)) ||
      (has_graph && x.requires_grad() &&
       has_conv_grad_x(compute_dtype, x, x.sizes(), convolution_format(x, weight), weight, shape));
  if (!may_drop_input && !has_own_part && product_dtype(x.device(), compute_dtype) == compute_dtype)
    return at::conv2d(x, weight, bias, {shape.stride, shape.stride}, {shape.padding, shape.padding}, {1, 1},
                      shape.groups);
  const std::optional<at::Tensor> no_norm;
  return Convolution::apply(x, weight, bias, no_norm, no_norm, shape, /*num_groups=*/int64_t{0}, /*eps=*/0.0,
                            /*silu=*/false);
}

at::Tensor group_norm_conv2d(const at::Tensor& x, const GroupNormLayer& norm, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const ConvolutionShape& shape,
                             at::ScalarType compute_dtype) {
  check_convolution(x, weight, shape);
  check_group_norm(x, norm);
  if (!is_kernel_dtype(x.scalar_type()) || x.numel() == 0)
    return conv2d(group_norm_silu(x, norm.num_groups, norm.weight, norm.bias, norm.eps, norm.silu), weight,
                  bias, shape, compute_dtype);
  return Convolution::apply(x, weight.to(compute_dtype), cast_or_none(bias, compute_dtype),
                            std::optional(norm.weight), std::optional(norm.bias), shape, norm.num_groups,
                            norm.eps, norm.silu);
}

}  // namespace kiln::ops
