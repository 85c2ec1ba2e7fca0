// Memory that a weight's gradient is written into, so that an op's backward makes it where it is kept. The
// step lends a weight its part of the flat gradients before the backward of its segment.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// Lends `memory`, of the leaf's shape, to the next backward through `leaf`; an undefined tensor takes back
// what was not used. Whoever uses it returns it as the gradient: autograd hands over that very tensor.
void lend_gradient_memory(const at::Tensor& leaf, const at::Tensor& memory);

// What was lent to `weight`, once: a weight that a graph uses twice has two gradients, which autograd adds.
// Undefined when nothing was, or the gradient is of another dtype or layout than a product of `dtype` writes.
at::Tensor take_gradient_memory(const at::Tensor& weight, at::ScalarType dtype);

}  // namespace kiln::ops
