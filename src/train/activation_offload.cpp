#include "train/activation_offload.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace kiln {

namespace {

// What is queued on `after` from here on waits for what is queued on `before`.
void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(before.device_type());
  event.record(before);
  event.block(after);
}

}  // namespace

ActivationOffload::ActivationOffload(at::Device device, size_t num_segments)
    : device_(device), slots_(num_segments) {
  if (device.is_cuda()) copies_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

c10::Stream ActivationOffload::compute_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

at::Tensor ActivationOffload::host_view(Slot& slot) const {
  if (device_.is_meta()) return {};
  const int64_t elements = c10::multiply_integers(slot.shape);
  if (!slot.host.defined() || slot.host.numel() < elements)
    slot.host = at::empty({elements}, slot.options.device(at::kCPU).pinned_memory(device_.is_cuda()));
  return slot.host.narrow(0, 0, elements).view(slot.shape);
}

void ActivationOffload::copy(Slot& slot, at::Tensor& to, const at::Tensor& from) {
  if (device_.is_meta()) return;
  if (copies_) order(compute_stream(), *copies_);
  {
    const c10::OptionalStreamGuard on_copies(copies_);
    to.copy_(from, /*non_blocking=*/true);
  }
  if (!copies_) return;
  slot.copied.emplace(device_.type());
  slot.copied->record(*copies_);
}

void ActivationOffload::wait(const Slot& slot) const {
  if (copies_) slot.copied->block(compute_stream());
}

void ActivationOffload::store(size_t segment, const at::Tensor& tensor) {
  Slot& slot = slots_[segment];
  slot.shape = tensor.sizes().vec();
  slot.options = tensor.options();
  slot.host_bytes = std::max(slot.host_bytes, static_cast<int64_t>(tensor.nbytes()));
  slot.on_device = tensor;
  at::Tensor host = host_view(slot);
  copy(slot, host, tensor);
}

void ActivationOffload::release(size_t segment) {
  wait(slots_[segment]);
  slots_[segment].on_device.reset();
}

void ActivationOffload::fetch(size_t segment) {
  Slot& slot = slots_[segment];
  slot.on_device =
      at::empty(slot.shape, slot.options);  // a block of the compute stream: copies wait for its last user
  copy(slot, slot.on_device, host_view(slot));
}

at::Tensor ActivationOffload::take(size_t segment) {
  wait(slots_[segment]);
  return std::exchange(slots_[segment].on_device, {});
}

int64_t ActivationOffload::host_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.host_bytes;
  return bytes;
}

}  // namespace kiln
