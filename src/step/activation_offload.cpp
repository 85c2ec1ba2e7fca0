#include "step/activation_offload.h"

#include <algorithm>
#include <utility>

#include "core/aten.h"
#include "core/tensors.h"
#include "parallel/offload/host_copy.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

ActivationOffload::ActivationOffload(at::Device device, size_t num_segments)
    : device_(device), copies_(device), slots_(num_segments) {}

at::Tensor ActivationOffload::host_view(Slot& slot) const {
  const int64_t elements = c10::multiply_integers(slot.shape);
  if (!slot.host.defined() || slot.host.numel() < elements)
    slot.host = host_zeros(elements, slot.options.dtype().toScalarType(), device_);
  return slot.host.narrow(0, 0, elements).view(slot.shape);
}

void ActivationOffload::store(size_t segment, const at::Tensor& tensor) {
  Slot& slot = slots_[segment];
  slot.shape = tensor.sizes().vec();
  slot.options = tensor.options();
  slot.host_bytes = std::max(slot.host_bytes, static_cast<int64_t>(tensor.nbytes()));
  slot.on_device = tensor;
  if (!has_values(device_)) return;
  const at::Tensor host = host_view(slot);
  slot.copied = copies_.run([&] { host.copy_(tensor, /*non_blocking=*/true); });
}

void ActivationOffload::release(size_t segment) {
  wait_on_stream(slots_[segment].copied);
  slots_[segment].on_device.reset();
}

void ActivationOffload::fetch(size_t segment) {
  Slot& slot = slots_[segment];
  slot.on_device =
      at::empty(slot.shape, slot.options);  // a block of the compute stream: copies wait for its last user
  if (!has_values(device_)) return;
  const at::Tensor host = host_view(slot);
  slot.copied = copies_.run([&] { slot.on_device.copy_(host, /*non_blocking=*/true); });
}

at::Tensor ActivationOffload::take(size_t segment) {
  wait_on_stream(slots_[segment].copied);
  return std::exchange(slots_[segment].on_device, {});
}

int64_t ActivationOffload::host_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.host_bytes;
  return bytes;
}

}  // namespace kiln
