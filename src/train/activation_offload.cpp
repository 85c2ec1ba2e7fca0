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
  if (!device.is_meta())
    copies_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

c10::Stream ActivationOffload::compute_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

at::Tensor ActivationOffload::host_view(Slot& slot) const {
  const int64_t elements = c10::multiply_integers(slot.shape);
  if (!slot.host.defined() || slot.host.numel() < elements)
    slot.host = at::empty({elements}, slot.options.device(at::kCPU).pinned_memory(true));
  return slot.host.narrow(0, 0, elements).view(slot.shape);
}

void ActivationOffload::store(size_t segment, const at::Tensor& tensor) {
  Slot& slot = slots_[segment];
  slot.shape = tensor.sizes().vec();
  slot.options = tensor.options().requires_grad(false);
  slot.host_bytes = std::max(slot.host_bytes, static_cast<int64_t>(tensor.nbytes()));
  slot.stored = tensor;
  if (!copies_) return;
  const at::Tensor host = host_view(slot);
  order(compute_stream(), *copies_);
  {
    const c10::StreamGuard on_copies(*copies_);
    host.copy_(tensor, /*non_blocking=*/true);
  }
  slot.copied.emplace(device_.type());
  slot.copied->record(*copies_);
}

void ActivationOffload::release(size_t segment) {
  Slot& slot = slots_[segment];
  if (copies_) slot.copied->block(compute_stream());
  slot.stored.reset();
}

void ActivationOffload::fetch(size_t segment) {
  Slot& slot = slots_[segment];
  slot.fetched = at::empty(slot.shape, slot.options);  // a block of the compute stream
  if (!copies_) return;
  const at::Tensor host = host_view(slot);
  order(compute_stream(), *copies_);  // after whoever used the block before
  {
    const c10::StreamGuard on_copies(*copies_);
    slot.fetched.copy_(host, /*non_blocking=*/true);
  }
  slot.copied.emplace(device_.type());
  slot.copied->record(*copies_);
}

at::Tensor ActivationOffload::take(size_t segment) {
  Slot& slot = slots_[segment];
  if (copies_) slot.copied->block(compute_stream());
  return std::exchange(slot.fetched, {});
}

int64_t ActivationOffload::host_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.host_bytes;
  return bytes;
}

}  // namespace kiln
