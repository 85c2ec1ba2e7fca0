// Keeps inputs of segments in host memory between their forward and their backward. Copies run on a stream of
// their own, beside the compute. All waits are between streams; the host never waits.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/offload/side_stream.h"

namespace kiln {

// The device's memory behaves the same in every step, however fast the link is. A tensor is let go only once
// the compute stream waits for its copy, so its block can be used again at once (record_stream would hold the
// block until the host happens to look). On meta (a dry run) the device's bytes come and go in the same way,
// and the host's bytes are counted.
class ActivationOffload {
 public:
  // Host buffers are made on first use and kept. They are pinned if `device` is CUDA.
  ActivationOffload(at::Device device, size_t num_segments);

  // Begins to copy `tensor` to the host, after the work queued so far.
  void store(size_t segment, const at::Tensor& tensor);
  // Lets the stored tensor go: work queued from here on may overwrite its memory. The caller drops its own
  // reference first.
  void release(size_t segment);
  // Begins to copy the tensor back to the device.
  void fetch(size_t segment);
  // Returns the fetched tensor. Work queued from here on may read it. REQUIRES: fetch(segment).
  at::Tensor take(size_t segment);

  int64_t host_bytes() const;  // of all buffers

 private:
  struct Slot {
    at::Tensor host;       // flat; undefined on meta
    at::Tensor on_device;  // from store() to release(), from fetch() to take()
    std::vector<int64_t> shape;
    at::TensorOptions options;
    int64_t host_bytes = 0;
    std::optional<c10::Event> copied;
  };
  at::Tensor host_view(Slot& slot) const;

  at::Device device_;
  SideStream copies_;
  std::vector<Slot> slots_;
};

}  // namespace kiln
