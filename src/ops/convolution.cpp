// Convolutions are those of oneDNN and cuDNN. Kiln adds 16-bit storage on CPUs that multiply in f32, a Meta
// path, and frozen convolutions that do not keep their input.
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "core/aten.h"
#include "core/error.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/kernels.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

at::MemoryFormat format_of(const at::Tensor& x, const at::Tensor& weight) {
  const auto channels_last = at::MemoryFormat::ChannelsLast;
  const bool is_channels_last =
      x.suggest_memory_format() == channels_last || weight.suggest_memory_format() == channels_last;
  return is_channels_last ? channels_last : at::MemoryFormat::Contiguous;
}

// Returns memory like the copies that a CPU makes of tensors that are not in the format it convolves in.
std::vector<at::Tensor> copies_to(at::MemoryFormat format, std::initializer_list<at::Tensor> tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors)
    if (computes_on_cpu(tensor) && !tensor.is_contiguous(format))
      copies.push_back(at::empty(tensor.sizes(), tensor.options(), format));
  return copies;
}

// Stands for oneDNN in a dry run: allocates and frees the scratch of a convolution.
void touch_scratch(int64_t (*scratch_bytes)(const cpu::ConvolutionSize&), const at::Tensor& input,
                   const at::Tensor& weight, const at::Tensor& output, at::IntArrayRef stride,
                   at::IntArrayRef padding, int64_t groups) {
  if (!computes_on_cpu(input)) return;
  const cpu::ConvolutionSize size{.dtype = input.scalar_type(),
                                  .batch = input.size(0),
                                  .in_channels = input.size(1),
                                  .out_channels = weight.size(0),
                                  .kernel_elements = weight.size(2) * weight.size(3),
                                  .in_height = input.size(2),
                                  .in_width = input.size(3),
                                  .out_pixels = output.size(2) * output.size(3),
                                  .padding = padding[1],
                                  .groups = groups,
                                  .is_strided = stride[0] > 1 || stride[1] > 1};
  at::empty({scratch_bytes(size)}, input.options().dtype(at::kByte));
}

// LibTorch without Python has no convolution on meta. Backends without their own convolution end here.
// Handles two spatial dimensions and no transposition.
at::Tensor convolution_on_meta(const at::Tensor& input, const at::Tensor& weight,
                               const std::optional<at::Tensor>&, at::IntArrayRef stride,
                               at::IntArrayRef padding, at::IntArrayRef dilation, bool, at::IntArrayRef,
                               int64_t groups) {
  std::vector<int64_t> shape = {input.size(0), weight.size(0)};
  for (int64_t d = 0; d < 2; ++d) {
    const int64_t reach = dilation[d] * (weight.size(d + 2) - 1) + 1;
    shape.push_back((input.size(d + 2) + 2 * padding[d] - reach) / stride[d] + 1);
  }
  const at::MemoryFormat format = format_of(input, weight);
  const std::vector<at::Tensor> copies = copies_to(format, {input, weight});
  at::Tensor out = at::empty(shape, input.options(), format);
  touch_scratch(cpu::convolution_scratch_bytes, input, weight, out, stride, padding, groups);
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward_on_meta(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef, bool, at::IntArrayRef, int64_t groups,
    std::array<bool, 3> wanted) {
  const at::MemoryFormat format = format_of(input, weight);
  const std::vector<at::Tensor> copies = copies_to(format, {grad_output, input, weight});
  const auto touch = [&](int64_t (*scratch_bytes)(const cpu::ConvolutionSize&)) {
    touch_scratch(scratch_bytes, input, weight, grad_output, stride, padding, groups);
  };
  at::Tensor grad_input, grad_weight, grad_bias;
  if (wanted[0]) {
    grad_input = at::empty(input.sizes(), input.options(), format);
    touch(cpu::convolution_grad_x_scratch_bytes);
  }
  if (wanted[1]) grad_weight = at::empty(weight.sizes(), weight.options(), format);
  if (wanted[2]) grad_bias = at::empty({grad_output.size(1)}, weight.options());
  if (wanted[1] || wanted[2]) touch(cpu::convolution_grad_weight_scratch_bytes);
  return {grad_input, grad_weight, grad_bias};
}

TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("convolution_overrideable", convolution_on_meta);
  library.impl("convolution_backward_overrideable", convolution_backward_on_meta);
}

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
                                                        grad.options(), format_of(grad, weight));
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
