#include "models/parts/host_values.h"

#include "core/aten.h"
#include "core/tensors.h"

namespace kiln {

at::Tensor on_device(const at::Tensor& host_values, at::Device device) {
  const bool stays = device.is_meta() && computing_device(device) == at::kCPU;
  return stays ? at::empty(host_values.sizes(), host_values.options().device(device))
               : host_values.to(device);
}

}  // namespace kiln
