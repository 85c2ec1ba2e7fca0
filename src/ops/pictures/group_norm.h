// GroupNorm with affine, then SiLU, without autograd: group_norm_silu and group_norm_conv2d are built of it.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

#include "ops/pictures/group_norm_tensors.h"

namespace kiln::ops {

// x (B, C, H, W) in f32, bf16 or fp16 is contiguous or channels-last, and the result like it.
GroupNormed group_norm_forward(const at::Tensor& x, const GroupNormLayer& norm);

// The gradients of x, weight and bias that are `wanted`, in the dtypes of these.
GroupNormGrads group_norm_backward(const at::Tensor& grad, const at::Tensor& x, const GroupNormLayer& norm,
                                   const GroupStatistics& statistics, std::array<bool, 3> wanted);

// Throws unless the norm fits x (B, C, H, W).
void check_group_norm(const at::Tensor& x, const GroupNormLayer& norm);

}  // namespace kiln::ops
