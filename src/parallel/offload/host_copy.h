// Copies between a device and its host that block neither. They go through pinned memory and are queued on
// the current stream.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <optional>

namespace kiln {

// Returns an uninitialised tensor in host memory, pinned if `device` is CUDA, so that copies from and to
// `device` do not block.
at::Tensor host_empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// Copies `host`, made by host_empty(), to `device`. The copy may still be under way when this returns. In a
// dry run it is memory alone.
at::Tensor sent_to(const at::Tensor& host, at::Device device);

// Values on their way to the host, which can go on queueing work for the device meanwhile.
class HostRead {
 public:
  HostRead() = default;
  // Reads nothing in a dry run.
  explicit HostRead(const at::Tensor& values);
  bool is_pending() const { return host_.defined(); }
  // The event after which the values are there; nothing where copies are done when they return.
  const std::optional<c10::Event>& end() const { return end_; }
  // Waits until the values are there and returns them.
  const at::Tensor& wait() const;

 private:
  at::Tensor host_;
  std::optional<c10::Event> end_;
};

// Copies large tensors into ordinary host memory through two pinned buffers in turn: the link fills one while
// the host empties the other. Pinning memory for a whole training state would take seconds.
class StagedRead {
 public:
  explicit StagedRead(at::Device device, int64_t buffer_bytes = int64_t{32} << 20);
  // Returns a finished copy of `tensor`. REQUIRES: it is contiguous.
  at::Tensor read(const at::Tensor& tensor);

 private:
  struct Buffer {
    at::Tensor bytes;
    std::optional<c10::Event> filled;
  };
  at::Device device_;
  int64_t buffer_bytes_;
  std::array<Buffer, 2> buffers_;
};

}  // namespace kiln
