// Copies between a device and its host that run beside the compute.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>

namespace kiln {

// A separate stream on CUDA. Elsewhere copies are done when they return, and there is nothing to wait for.
class CopyStream {
 public:
  explicit CopyStream(at::Device device);

  // Queues `copies` to begin after the work that was queued on the compute stream so far. Returns an event at
  // their end.
  std::optional<c10::Event> run(const std::function<void()>& copies) const;
  // Makes work that is queued on the compute stream from now on begin after `end`.
  void wait(const std::optional<c10::Event>& end) const;

 private:
  c10::Stream compute_stream() const;

  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace kiln
