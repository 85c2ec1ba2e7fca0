#include "models/parts/host_values.h"

#include "core/aten.h"
#include "core/dry_run.h"

namespace kiln {

at::Tensor on_device(const at::Tensor& host_values, at::Device device) {
  const bool stays = device.is_meta() && dry_run_device() == DryRunDevice::kCpu;
  return stays ? at::empty(host_values.sizes(), host_values.options().device(device))
               : host_values.to(device);
}

}  // namespace kiln
