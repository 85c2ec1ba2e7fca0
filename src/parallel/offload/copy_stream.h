// Copies between a device and its host beside the compute.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>

namespace kiln {

// A stream of its own on CUDA. Elsewhere copies are done when they return, and there is nothing to wait for.
class CopyStream {
 public:
  explicit CopyStream(at::Device device);

  // What `copies` queues begins once the work that the compute stream was given so far is done. Returns its
  // end.
  std::optional<c10::Event> run(const std::function<void()>& copies) const;
  // What the compute stream is given from here on begins after `end`.
  void wait(const std::optional<c10::Event>& end) const;

 private:
  c10::Stream compute_stream() const;

  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace kiln
