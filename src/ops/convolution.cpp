// Convolutions are those of oneDNN and cuDNN. Kiln adds fp16 as storage on a CPU, a Meta path, and frozen
// convolutions that do not keep their input.
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <tuple>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cpu/onednn_scratch.h"
#include "ops/kernel_types.h"
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
  const at::Tensor out = at::empty(shape, input.options(), format);
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

// A convolution whose weight and bias are not trained. It does not keep its input.
struct FrozenConvolution : torch::autograd::Function<FrozenConvolution> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const ConvolutionShape& shape) {
    ctx->save_for_backward({weight});
    ctx->saved_data["sizes"] = x.sizes().vec();
    ctx->saved_data["shape"] = std::vector<int64_t>{shape.stride, shape.padding, shape.groups};
    return at::conv2d(x, weight, bias, {shape.stride, shape.stride}, {shape.padding, shape.padding}, {1, 1},
                      shape.groups);
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    const at::Tensor weight = ctx->get_saved_variables()[0], &grad = grads[0];
    const std::vector<int64_t> shape = ctx->saved_data["shape"].toIntVector();
    // The gradient of the input depends on the input's shape; its values are not read.
    const at::Tensor x =
        at::empty(ctx->saved_data["sizes"].toIntVector(), grad.options(), format_of(grad, weight));
    const at::Tensor grad_x = std::get<0>(at::convolution_backward(
        grad, x, weight, at::OptionalIntArrayRef(), {shape[0], shape[0]}, {shape[1], shape[1]}, {1, 1},
        /*transposed=*/false, {0, 0}, shape[2], {true, false, false}));
    return {grad_x, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  const ConvolutionShape& shape, at::ScalarType compute_dtype) {
  if (x.dim() != 4 || weight.dim() != 4 || x.size(1) != weight.size(1) * shape.groups)
    fail("conv2d", "expected x (B, C, H, W) and weight (out, C / {}, k, k), got {} and {}", shape.groups,
         fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
  const at::ScalarType dtype = computes_on_cpu(x) ? cpu_product_dtype(compute_dtype) : compute_dtype;
  const auto cast = [&](const at::Tensor& tensor) { return tensor.to(compute_dtype).to(dtype); };
  std::optional<at::Tensor> cast_bias;
  if (bias) cast_bias = cast(*bias);
  const bool is_frozen = !weight.requires_grad() && !(bias && bias->requires_grad());
  if (is_frozen && x.requires_grad() && at::GradMode::is_enabled())
    return FrozenConvolution::apply(cast(x), cast(weight), cast_bias, shape).to(compute_dtype);
  return at::conv2d(cast(x), cast(weight), cast_bias, {shape.stride, shape.stride},
                    {shape.padding, shape.padding}, {1, 1}, shape.groups)
      .to(compute_dtype);
}

}  // namespace kiln::ops
