#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <fmt/ranges.h>

#include "core/aten.h"
#include "core/error.h"
#include "core/tensors.h"
#include "ops/cpu/kernels.h"
#include "ops/kernels.h"
#include "ops/op_mark.h"
#include "ops/ops.h"

namespace kiln::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

// Returns weight (2C, 1, 3, 3) as (9, 2C) f32.
at::Tensor by_tap(const at::Tensor& weight) { return weight.to(at::kFloat).flatten(1).t().contiguous(); }

struct Picture {
  int64_t height, width;
};

cpu::GluConv kernel_args(const at::Tensor& h, const at::Tensor& taps, const at::Tensor& bias,
                         const Picture& picture, int64_t b) {
  const char* data = static_cast<const char*>(h.const_data_ptr());
  return {.h = data + b * h.stride(0) * h.element_size(),
          .dtype = from_scalar_type(h.scalar_type()),
          .weight = taps.const_data_ptr<float>(),
          .bias = bias.const_data_ptr<float>(),
          .height = static_cast<size_t>(picture.height),
          .width = static_cast<size_t>(picture.width),
          .channels = static_cast<size_t>(h.size(2) / 2)};
}

// Calls body(picture, first channel, number of channels) in parallel. h (B, height * width, 2C).
template <class Body>
void for_each_block(const at::Tensor& h, const Body& body) {
  const int64_t channels = h.size(2) / 2, block = cpu::kGluBlockChannels, blocks = at::divup(channels, block);
  kLoop.on(h)(h.size(0) * blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % blocks * block;
      body(i / blocks, first, std::min(block, channels - first));
    }
  });
}

char* sample_of(const at::Tensor& tensor, int64_t b) {
  return static_cast<char*>(tensor.data_ptr()) + b * tensor.stride(0) * tensor.element_size();
}

// The gradients of the reference, for devices and dtypes without a kernel.
tensor_list composed_grads(const at::Tensor& grad, const at::Tensor& h, const at::Tensor& weight,
                           const at::Tensor& bias, const Picture& picture, std::array<bool, 3> wanted) {
  const at::ScalarType math = h.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto pixels = [&](const at::Tensor& rows) {
    return rows.to(math).unflatten(1, {picture.height, picture.width}).permute({0, 3, 1, 2});
  };
  const int64_t channels[] = {h.size(2)};
  const at::Tensor wide = pixels(h), activated = at::silu(wide), taps = weight.to(math);
  const at::Tensor convolved =
      at::conv2d(activated, taps, bias.to(math), {1, 1}, {1, 1}, {1, 1}, /*groups=*/channels[0]);
  const std::vector<at::Tensor> halves = convolved.chunk(2, 1);
  const at::Tensor of_out = pixels(grad);
  const at::Tensor of_convolved =
      at::cat({of_out * at::silu(halves[1]), at::silu_backward(of_out * halves[0], halves[1])}, 1);
  auto [of_activated, grad_weight, grad_bias] =
      at::convolution_backward(of_convolved, activated, taps, channels, {1, 1}, {1, 1}, {1, 1},
                               /*transposed=*/false, {0, 0}, /*groups=*/channels[0], wanted);
  at::Tensor grad_h;
  if (wanted[0])
    grad_h = at::silu_backward(of_activated, wide).permute({0, 2, 3, 1}).flatten(1, 2).to(h.scalar_type());
  if (wanted[1]) grad_weight = grad_weight.to(weight.scalar_type());
  if (wanted[2]) grad_bias = grad_bias.to(bias.scalar_type());
  return {grad_h, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
}

// Where there is no kernel it consists of ATen's operations, and is recorded as those.
struct GluDepthwiseConv : torch::autograd::Function<GluDepthwiseConv> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& h_in, const at::Tensor& weight,
                            const at::Tensor& bias, int64_t height, int64_t width) {
    ctx->saved_data["height"] = height;
    ctx->saved_data["width"] = width;
    if (!has_cpu_kernel(h_in)) {
      ctx->save_for_backward({h_in, weight, bias});
      return reference::glu_depthwise_conv(h_in, weight, bias, height, width);
    }
    OpMark mark("kiln::glu_depthwise_conv", h_in, weight, bias);
    const at::Tensor h = h_in.contiguous(), taps = by_tap(weight),
                     wide_bias = bias.to(at::kFloat).contiguous();
    at::Tensor out = at::empty({h.size(0), h.size(1), h.size(2) / 2}, h.options());
    ctx->save_for_backward({h, weight, bias});
    for_each_block(h, [&](int64_t b, int64_t first, int64_t count) {
      cpu::glu_conv(kernel_args(h, taps, wide_bias, {height, width}, b), sample_of(out, b), first, count);
    });
    mark.outputs(out);
    return out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &h = saved[0], &weight = saved[1], &bias = saved[2];
    const Picture picture = {ctx->saved_data["height"].toInt(), ctx->saved_data["width"].toInt()};
    if (!has_cpu_kernel(h))
      return composed_grads(grads[0], h, weight, bias, picture,
                            {ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2)});
    OpMark mark("kiln::glu_depthwise_conv_backward", grads[0], h, weight, bias);
    const at::Tensor taps = by_tap(weight), wide_bias = bias.to(at::kFloat).contiguous();
    const at::Tensor grad = grads[0].contiguous(), grad_h = at::empty_like(h);
    // Sums each picture, then all of them in order, so the bits do not depend on the threads.
    const at::Tensor grad_taps = at::empty({h.size(0), taps.size(0), taps.size(1)}, taps.options());
    const at::Tensor grad_biases = at::empty({h.size(0), taps.size(1)}, taps.options());
    for_each_block(h, [&](int64_t b, int64_t first, int64_t count) {
      cpu::glu_conv_grad(kernel_args(h, taps, wide_bias, picture, b), sample_of(grad, b),
                         sample_of(grad_h, b), reinterpret_cast<float*>(sample_of(grad_taps, b)),
                         reinterpret_cast<float*>(sample_of(grad_biases, b)), first, count);
    });
    const at::Tensor grad_weight =
        grad_taps.sum(0).t().contiguous().view(weight.sizes()).to(weight.scalar_type());
    const at::Tensor grad_bias = grad_biases.sum(0).to(bias.scalar_type());
    mark.outputs(grad_h, grad_weight, grad_bias);
    return {grad_h, grad_weight, grad_bias, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor glu_depthwise_conv(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& bias,
                              int64_t height, int64_t width) {
  if (h.dim() != 3 || h.size(1) != height * width || h.size(2) % 2 != 0 || weight.dim() != 4 ||
      weight.size(0) != h.size(2) || weight.size(1) != 1 || weight.size(2) != 3 || weight.size(3) != 3 ||
      bias.numel() != h.size(2))
    fail("glu_depthwise_conv",
         "expected h (B, {} * {}, 2C), weight (2C, 1, 3, 3) and bias (2C), got ({}), ({}) and ({})", height,
         width, fmt::join(h.sizes(), ", "), fmt::join(weight.sizes(), ", "), fmt::join(bias.sizes(), ", "));
  return h.numel() > 0 ? GluDepthwiseConv::apply(h, weight, bias, height, width)
                       : reference::glu_depthwise_conv(h, weight, bias, height, width);
}

namespace reference {

at::Tensor glu_depthwise_conv(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& bias,
                              int64_t height, int64_t width) {
  const at::ScalarType dtype = h.scalar_type();
  const at::ScalarType math = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor pixels = at::silu(h.to(math)).unflatten(1, {height, width}).permute({0, 3, 1, 2});
  const at::Tensor convolved =
      at::conv2d(pixels, weight.to(math), bias.to(math), {1, 1}, {1, 1}, {1, 1}, h.size(2));
  const std::vector<at::Tensor> halves = convolved.chunk(2, 1);
  return (halves[0] * at::silu(halves[1])).permute({0, 2, 3, 1}).flatten(1, 2).to(dtype);
}

}  // namespace reference
}  // namespace kiln::ops
