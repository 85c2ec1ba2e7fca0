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

// grad (M, out)^T @ rows (M, in) -> (out, in), in `memory` where that is defined (ops/gradient_memory.h).
at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows, at::Tensor memory = {});

// Sum over the rows of grad (M, out), accumulated in f32 -> (out), likewise.
at::Tensor affine_grad_bias(const at::Tensor& grad, at::Tensor memory = {});

// affine_grad_weight and affine_grad_bias of one layer; on CUDA in one product where cuBLASLt has it.
struct AffineGrads {
  at::Tensor weight, bias;
};
AffineGrads affine_grads(const at::Tensor& grad, const at::Tensor& rows, const AffineGrads& memory);

// affine(), then gelu_tanh: what backward needs of it, and what comes out. On CUDA in one product.
struct GeluResult {
  at::Tensor hidden, activation;  // (M, out)
};
GeluResult affine_gelu(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias);

// affine_grad_rows(grad, weight) * gelu_tanh'(hidden) (M, in), and its sum over the rows (in), in
// `bias_memory` where that is defined. On CUDA in one product.
struct HiddenGrads {
  at::Tensor hidden, bias;
};
HiddenGrads affine_grad_rows_gelu(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& hidden,
                                  const at::Tensor& bias_memory);

}  // namespace kiln::ops
