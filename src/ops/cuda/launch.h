// The way from tensors on a CUDA device to the kernels: current stream, device, errors. In a build without
// them, kernels_compiled() is false and the rest must not be called. Arguments as in ops/cuda/kernels.h.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/kernel_args.h"

namespace kiln::ops::cuda {

bool kernels_compiled();

void gelu_tanh(const at::Tensor& in, const at::Tensor& out);
void gelu_tanh_grad(const at::Tensor& grad, const at::Tensor& in, const at::Tensor& grad_in);
void adaln(const AdalnArgs& args, const at::Tensor& out);
void adaln_grad(const AdalnArgs& args, const at::Tensor& grad, const at::Tensor& dx, const at::Tensor& dshift,
                const at::Tensor& dscale, const at::Tensor& partials, int64_t rows_per_partial);
void gated_residual(const GatedResidualArgs& args, const at::Tensor& x, const at::Tensor& out);
void gated_residual_grad(const GatedResidualArgs& args, const at::Tensor& grad, const at::Tensor& dy,
                         const at::Tensor& dgate, const at::Tensor& partials, int64_t rows_per_partial);
void adamw(const AdamwElements& elements, const AdamwFactors& factors, const at::Tensor& master);
at::Tensor sum_of_squares(const at::Tensor& flat);

}  // namespace kiln::ops::cuda
