// The tanh approximation of GELU (Hendrycks & Gimpel 2016), elementwise and without autograd.
// gelu_tanh_linear is built of it.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// out = gelu_tanh(in). Both are contiguous and have one shape, dtype (f32, bf16 or fp16; f64 goes to ATen)
// and device.
void gelu_tanh_forward(const at::Tensor& in, at::Tensor& out);

// grad_in = grad * gelu_tanh'(in). All are contiguous and have one shape, dtype and device. grad_in may be
// grad.
void gelu_tanh_backward(const at::Tensor& grad, const at::Tensor& in, at::Tensor& grad_in);

}  // namespace kiln::ops
