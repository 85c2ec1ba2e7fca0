// What gated_residual and its fusion with the norm after it share.
#pragma once
#include <ATen/core/Tensor.h>

#include "ops/kernel_args.h"

namespace kiln::ops {

// `gate` with unit stride in its rows, y contiguous.
GatedResidualArgs gated_residual_args(const at::Tensor& gate, const at::Tensor& y);

// Throws unless x is (B, N, D), gate (B, D) and y like x.
void check_gated_residual(const char* who, const at::Tensor& x, const at::Tensor& gate, const at::Tensor& y);

}  // namespace kiln::ops
