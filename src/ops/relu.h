// ReLU with a Meta path, which ATen's own lacks.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln::ops {

// max(x, 0), in the layout of x. Saves its result. NaN stays NaN.
at::Tensor relu(const at::Tensor& x);

namespace reference {
at::Tensor relu(const at::Tensor& x);
}  // namespace reference

}  // namespace kiln::ops
