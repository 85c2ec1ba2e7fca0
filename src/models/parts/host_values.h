// Small tensors that the host computes and the device needs.
#pragma once
#include <ATen/core/Tensor.h>

namespace kiln {

// Returns values that the host has computed, on a device. A dry run of a CPU copies nothing, because there
// they already are where they are needed.
at::Tensor on_device(const at::Tensor& host_values, at::Device device);

}  // namespace kiln
