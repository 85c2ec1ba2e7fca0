// group_norm_silu of channels-last pictures on a GPU, where they are rows of channels and no other format is
// made of them.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace kiln::ops {

// False for other devices and formats, and for builds without kernels and more channels than these take.
bool is_channels_last_on_gpu(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// See group_norm_silu. Requires is_channels_last_on_gpu().
at::Tensor group_norm_on_gpu(const at::Tensor& x, int64_t num_groups, const at::Tensor& weight,
                             const at::Tensor& bias, double eps, bool silu);

}  // namespace kiln::ops
