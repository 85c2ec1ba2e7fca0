// The tanh approximation of GELU (Hendrycks & Gimpel 2016) and GEGLU (Shazeer 2020), without autograd.
// gelu_tanh_linear and geglu_linear are built of them.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// out = gelu_tanh(in). Both are contiguous and have one shape, dtype (f32, bf16 or fp16; f64 goes to ATen)
// and device.
void gelu_tanh_forward(const at::Tensor& in, at::Tensor& out);

// grad_in = grad * gelu_tanh'(in). All are contiguous and have one shape, dtype and device. grad_in may be
// grad.
void gelu_tanh_backward(const at::Tensor& grad, const at::Tensor& in, at::Tensor& grad_in);

// h (..., 2F) -> h[..., :F] * gelu(h[..., F:]) with the exact (erf) GELU, and the gradient of h.
at::Tensor geglu_forward(const at::Tensor& h);
at::Tensor geglu_backward(const at::Tensor& grad, const at::Tensor& h);

}  // namespace kiln::ops
