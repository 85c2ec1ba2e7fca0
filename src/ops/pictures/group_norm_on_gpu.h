// group_norm_silu of channels-last pictures on a GPU, where they are rows of channels and no other format is
// made of them.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

#include "ops/pictures/group_norm_tensors.h"

namespace kiln::ops {

// False for other devices and formats, and for builds without kernels and more channels than these take.
bool is_channels_last_on_gpu(const at::Tensor& x, const GroupNormLayer& norm);

// See group_norm_forward() and group_norm_backward(). The gradient of x is always made.
// REQUIRES: is_channels_last_on_gpu(x, norm).
GroupNormed group_norm_on_gpu(const at::Tensor& x, const GroupNormLayer& norm);
GroupNormGrads group_norm_grad_on_gpu(const at::Tensor& grad, const at::Tensor& x, const GroupNormLayer& norm,
                                      const GroupStatistics& statistics, std::array<bool, 3> wanted);

}  // namespace kiln::ops
