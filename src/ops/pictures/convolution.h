// The gradient of a 3x3 convolution's weight by Kiln's own kernel, without autograd.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/ops.h"

namespace kiln::ops {

// True for shapes and CPUs where the kernel was measured to be faster than oneDNN's: stride 1 with AVX2
// alone.
bool has_conv_grad_weight(const at::Tensor& x, const at::Tensor& weight, const ConvolutionShape& shape);

// grad (B, out, h, w) of the result and x (B, in, H, W), of one dtype f32, bf16 or fp16, with stride 1,
// without groups -> the gradient of weight (out, in, 3, 3), in the memory that was lent to that
// (ops/gradient_memory.h). Each element is one f32 sum over all pixels in their order, on any number of
// threads.
at::Tensor conv_grad_weight(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight,
                            const ConvolutionShape& shape);

}  // namespace kiln::ops
