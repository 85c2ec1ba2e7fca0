// Brings gradients from a device to an optimizer on its host, and new weights back.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <optional>

namespace kiln {

// Units go through two slots in turn: while the host updates one unit, the link brings the next one's
// gradients and takes back the weights of the one before. Copies are queued on the current stream, which has
// nothing else to do then.
class HostExchange {
 public:
  // most_elements: elements of the largest shard.
  HostExchange(at::Device device, int64_t most_elements, at::ScalarType grad_dtype,
               at::ScalarType weight_dtype);

  // Begins to copy gradients to the host. REQUIRES: all earlier ones but the last have been taken.
  void fetch(const at::Tensor& gradients);
  // Waits for the oldest gradients that were fetched and not taken, and returns them in host memory. They
  // stay there until the second fetch() after their own.
  at::Tensor take();
  // Returns host memory for `elements` new weights, to be written before send().
  at::Tensor weights(int64_t elements);
  // Begins to copy what weights() returned to `device_weights`. Work that is queued from now on reads it.
  void send(const at::Tensor& device_weights);

  int64_t host_bytes() const;

 private:
  struct Slot {
    at::Tensor gradients, weights;
    int64_t num_gradients = 0;
    std::optional<c10::Event> fetched, sent;
  };

  at::Device device_;
  std::array<Slot, 2> slots_;
  size_t num_fetched_ = 0, num_taken_ = 0, num_sent_ = 0;
};

}  // namespace kiln
