// The three products of a linear layer on rows, shared by the ops that contain one. Operands and results have
// one dtype; a CPU multiplies in cpu_product_dtype(). Not differentiable.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/gradient_memory.h"

namespace kiln::ops {

namespace cpu {
enum class Product;  // ops/cpu/onednn_scratch.h
}
// left @ right, or left @ right^T + bias for kAffine. left and right have the dtype that is multiplied.
struct ProductOperands {
  cpu::Product product;
  at::Tensor left, right;
  at::Tensor bias{};    // of any dtype; undefined: none
  at::Tensor memory{};  // for the result; undefined: the product makes it
};
at::Tensor aten_product(ProductOperands operands);

// rows (M, in) @ weight (out, in)^T + bias (out) -> (M, out).
at::Tensor affine(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// grad (M, out) @ weight (out, in) -> (M, in).
at::Tensor affine_grad_rows(const at::Tensor& grad, const at::Tensor& weight);

// grad (M, out)^T @ rows (M, in) -> (out, in), written into `memory` if that is defined
// (ops/gradient_memory.h).
at::Tensor affine_grad_weight(const at::Tensor& grad, const at::Tensor& rows, at::Tensor memory = {});

// Sum over the rows of grad (M, out), accumulated in f32 -> (out), written into `memory` if that is defined.
at::Tensor affine_grad_bias(const at::Tensor& grad, at::Tensor memory = {});

// affine_grad_weight and affine_grad_bias of one layer. On CUDA they are one product where cuBLASLt has it.
struct AffineGrads {
  at::Tensor weight, bias;
};
AffineGrads affine_grads(const at::Tensor& grad, const at::Tensor& rows, const AffineGrads& memory);

// affine(), then gelu_tanh; on CUDA in one product. Backward needs `hidden`, the input of gelu_tanh.
struct GeluResult {
  at::Tensor hidden, activation;  // (M, out)
};
GeluResult affine_gelu(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& bias);

// affine_grad_rows(grad, weight) * gelu_tanh'(hidden) (M, in), and its sum over the rows (in), which is
// written into `bias_memory` if that is defined. On CUDA in one product.
struct HiddenGrads {
  at::Tensor hidden, bias;
};
HiddenGrads affine_grad_rows_gelu(const at::Tensor& grad, const at::Tensor& weight, const at::Tensor& hidden,
                                  const at::Tensor& bias_memory);

// The gradients of a layer that autograd asks for. Set `bias` to false for a layer without bias.
struct LayerNeeds {
  bool weight = true, bias = true;
};

// Returns the gradients of `weight` and `bias` from that of the layer's result, in the memory that was lent
// to them. `rows` returns the layer's input and is called only if it is needed.
template <class Rows>
AffineGrads layer_grads(const at::Tensor& grad, const Rows& rows, const at::Tensor& weight,
                        const at::Tensor& bias, LayerNeeds needs) {
  AffineGrads memory, grads;
  if (needs.weight) memory.weight = take_gradient_memory(weight, grad.scalar_type());
  if (needs.bias) memory.bias = take_gradient_memory(bias, grad.scalar_type());
  if (needs.weight && needs.bias) return affine_grads(grad, rows(), memory);
  if (needs.weight) grads.weight = affine_grad_weight(grad, rows(), memory.weight);
  if (needs.bias) grads.bias = affine_grad_bias(grad, memory.bias);
  return grads;
}

}  // namespace kiln::ops
