// Sums of two dtypes. On a CPU ATen's kernel first makes a wider copy of the narrower operand. A dry run on
// meta tensors sees that copy only through these functions.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// Returns a + b in the wider dtype.
at::Tensor mixed_sum(const at::Tensor& a, const at::Tensor& b);

// sum += term. `sum` has the wider dtype.
void mixed_add_(at::Tensor& sum, const at::Tensor& term);

}  // namespace kiln::ops
