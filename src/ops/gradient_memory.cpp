#include "ops/gradient_memory.h"

namespace kiln::ops {

// A leaf's own .grad holds it: autograd::grad() leaves that alone, and it reaches the engine's threads.
void lend_gradient_memory(const at::Tensor& leaf, const at::Tensor& memory) { leaf.mutable_grad() = memory; }

at::Tensor take_gradient_memory(const at::Tensor& weight, at::ScalarType dtype) {
  if (!weight.is_leaf() || !weight.mutable_grad().defined()) return {};
  if (weight.mutable_grad().scalar_type() != dtype || !weight.mutable_grad().is_contiguous()) return {};
  at::Tensor memory = weight.mutable_grad();
  weight.mutable_grad().reset();
  return memory;
}

}  // namespace kiln::ops
