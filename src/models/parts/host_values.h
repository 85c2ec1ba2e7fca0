// Small tensors that the host computes and the device needs.
#pragma once
#include "core/aten.h"
#include "core/dry_run.h"

namespace kiln {

// Returns values that the host has computed, on a device. A dry run of a CPU copies nothing, because there
// they already are where they are needed.
inline at::Tensor on_device(const at::Tensor& host_values, at::Device device) {
  const bool stays = device.is_meta() && dry_run_device() == DryRunDevice::kCpu;
  return stays ? at::empty(host_values.sizes(), host_values.options().device(device))
               : host_values.to(device);
}

}  // namespace kiln
