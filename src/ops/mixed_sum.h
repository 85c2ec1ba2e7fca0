// Sums of two dtypes. ATen's kernel on a CPU first makes a wider copy of the narrower operand, which a dry
// run on meta tensors would otherwise not see.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// a + b, in the wider dtype.
at::Tensor mixed_sum(const at::Tensor& a, const at::Tensor& b);

// sum += term; `sum` has the wider dtype.
void mixed_add_(at::Tensor& sum, const at::Tensor& term);

}  // namespace kiln::ops
