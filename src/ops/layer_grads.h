// What the backward of an op with a linear layer in it computes of that layer.
#pragma once
#include "ops/gradient_memory.h"
#include "ops/matrix_products.h"

namespace kiln::ops {

// Which of the gradients autograd asks for. A layer without bias has no such input to ask of.
struct LayerNeeds {
  bool weight = true, bias = true;
};

// The gradients of `weight` and `bias` from that of the layer's result, in memory that was
// lent to them. `rows`: gives the layer's input; called only if it is needed.
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
