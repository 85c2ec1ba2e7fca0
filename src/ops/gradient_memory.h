// Memory that a weight's gradient is written into, so that an op's backward makes the gradient where it is
// kept. The step lends each weight its part of the flat gradients before the backward of its segment.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// Lends `memory`, of the leaf's shape, to the next backward through `leaf`. An undefined tensor takes back
// what was not used. An op that uses the memory returns it as the gradient, and autograd hands over that very
// tensor.
void lend_gradient_memory(const at::Tensor& leaf, const at::Tensor& memory);

// Returns the memory that was lent to `weight`, once: a weight that a graph uses twice has two gradients,
// which autograd adds. Returns an undefined tensor if nothing was lent, or if the memory's dtype or layout is
// not what a product of `dtype` writes.
at::Tensor take_gradient_memory(const at::Tensor& weight, at::ScalarType dtype);

}  // namespace kiln::ops
