// Kiln's own 3x3 convolutions on a CPU, without autograd. Each part has a question: true for shapes and CPUs
// where the part was measured to be faster than oneDNN's. The number of threads changes no bit.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/ops.h"

namespace kiln::ops {

bool has_conv_forward(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape);
// For the gradient of x of `sizes` in `format`, computed in `dtype`.
bool has_conv_grad_x(at::ScalarType dtype, const at::Tensor& grad, at::IntArrayRef sizes,
                     at::MemoryFormat format, const at::Tensor& weight, const ConvolutionShape& shape);
bool has_conv_grad_weight(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape);

// x (B, in, H, W), weight (out, in, 3, 3) and bias (out) of one dtype, f32 or bf16, without groups ->
// (B, out, h, w), channels-last. Each element is summed in f32 over channels and taps in their order.
at::Tensor conv_forward(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        const ConvolutionShape& shape);

// grad (B, out, h, w) of the result -> the gradient of x (B, in, H, W) of `sizes`, channels-last; with stride
// 1.
at::Tensor conv_grad_x(const at::Tensor& grad, at::IntArrayRef sizes, const at::Tensor& weight,
                       const ConvolutionShape& shape);

// grad (B, out, h, w) of the result and x (B, in, H, W), of one dtype f32, bf16 or fp16, with stride 1 where
// AVX-512 alone takes others -> the gradient of weight (out, in, 3, 3), in the memory that was lent to that
// (ops/gradient_memory.h). Each element is an f32 sum over all pixels in their order.
at::Tensor conv_grad_weight(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                            const ConvolutionShape& shape);

}  // namespace kiln::ops
