#include "parallel/offload/host_exchange.h"

#include "core/aten.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

HostExchange::HostExchange(at::Device device, int64_t most_elements, at::ScalarType grad_dtype,
                           at::ScalarType weight_dtype)
    : device_(device) {
  for (Slot& slot : slots_) {
    slot.gradients = host_zeros(most_elements, grad_dtype, device);
    slot.weights = host_zeros(most_elements, weight_dtype, device);
  }
}

void HostExchange::fetch(const at::Tensor& gradients) {
  Slot& slot = slots_[num_fetched_++ % slots_.size()];
  slot.num_gradients = gradients.numel();
  slot.gradients.narrow(0, 0, slot.num_gradients).copy_(gradients, /*non_blocking=*/true);
  slot.fetched = record_event(device_);
}

at::Tensor HostExchange::take() {
  Slot& slot = slots_[num_taken_++ % slots_.size()];
  if (slot.fetched) slot.fetched->synchronize();
  return slot.gradients.narrow(0, 0, slot.num_gradients);
}

at::Tensor HostExchange::weights(int64_t elements) {
  Slot& slot = slots_[num_sent_ % slots_.size()];
  if (slot.sent) slot.sent->synchronize();
  return slot.weights.narrow(0, 0, elements);
}

void HostExchange::send(const at::Tensor& device_weights) {
  Slot& slot = slots_[num_sent_++ % slots_.size()];
  device_weights.copy_(slot.weights.narrow(0, 0, device_weights.numel()), /*non_blocking=*/true);
  slot.sent = record_event(device_);
}

int64_t HostExchange::host_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_)
    bytes += static_cast<int64_t>(slot.gradients.nbytes() + slot.weights.nbytes());
  return bytes;
}

}  // namespace kiln
