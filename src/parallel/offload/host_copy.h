// Copies between a device and its host that do not stop either: through pinned memory, queued on the current
// stream.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstddef>
#include <optional>

namespace kiln {

// An uninitialised tensor in host memory from which copies to `device`, and to which copies from it, do not
// block: pinned where `device` is CUDA.
at::Tensor host_empty(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// `host`, made by host_empty(), on `device`: the copy may still be under way when this returns.
at::Tensor sent_to(const at::Tensor& host, at::Device device);

// Values on their way to the host. What the device is given meanwhile does not wait for them.
class HostRead {
 public:
  HostRead() = default;
  explicit HostRead(const at::Tensor& values);
  bool is_pending() const { return host_.defined(); }
  // Behind which the values are there; nothing where copies are done when they return.
  const std::optional<c10::Event>& end() const { return end_; }
  // The values, once they are there.
  const at::Tensor& wait() const;

 private:
  at::Tensor host_;
  std::optional<c10::Event> end_;
};

// Copies large tensors into ordinary memory of the host: by way of two pinned buffers in turn, so that the
// link brings one while the host empties the other. That much pinned memory for a whole training state would
// take seconds to get.
class StagedRead {
 public:
  explicit StagedRead(at::Device device, int64_t buffer_bytes = int64_t{32} << 20);
  // A copy of `tensor`, which is contiguous; done when it returns.
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
