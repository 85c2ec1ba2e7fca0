#include "ops/gradient_memory.h"

namespace kiln::ops {

// The memory is kept in the leaf's own .grad: autograd::grad() does not touch that, and the engine's threads
// can read it.
void lend_gradient_memory(const at::Tensor& leaf, const at::Tensor& memory) { leaf.mutable_grad() = memory; }

at::Tensor take_gradient_memory(const at::Tensor& weight, at::ScalarType dtype) {
  if (!weight.is_leaf() || !weight.mutable_grad().defined()) return {};
  if (weight.mutable_grad().scalar_type() != dtype || !weight.mutable_grad().is_contiguous()) return {};
  at::Tensor memory = weight.mutable_grad();
  weight.mutable_grad().reset();
  return memory;
}

}  // namespace kiln::ops
