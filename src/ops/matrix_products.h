// The three products of a linear layer on rows, shared by the ops that contain one. All operands have one
// dtype, the result too; fp16 on a CPU is multiplied in f32. Not differentiable.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace kiln::ops {

// rows (M, in) @ weight (out, in)^T + bias (out) -> (M, out).
at::Tensor affine(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// grad (M, out) @ weight (out, in) -> (M, in).
at::Tensor affine_grad_rows(const at::Tensor& grad, const at::Tensor& weight);

// grad (M, out)^T @ rows (M, in) -> (out, in).
at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows);

// Sum over the rows of grad (M, out), accumulated in f32 -> (out).
at::Tensor affine_grad_bias(const at::Tensor& grad);

}  // namespace kiln::ops
