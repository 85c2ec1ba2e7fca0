// Inputs of segments that wait in host memory between their forward and their backward. Copies run on a
// stream of their own, beside the compute; every wait is between streams, none on the host.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/offload/copy_stream.h"

namespace kiln {

// The device's memory behaves the same in every step, whatever the speed of the link: a tensor is let go only
// once the compute stream waits for its copy, so that its block can be used again at once (record_stream
// would hold it until the host happens to look). On meta (a dry run) the device's bytes come and go alike and
// the host's are counted.
class ActivationOffload {
 public:
  // Host buffers are made on first use and kept; pinned where `device` is CUDA.
  ActivationOffload(at::Device device, size_t num_segments);

  // Begins to copy what the work queued so far makes.
  void store(size_t segment, const at::Tensor& tensor);
  // Work queued from here on may overwrite the stored tensor; drop it before this is called.
  void release(size_t segment);
  // Begins to bring it back.
  void fetch(size_t segment);
  // What fetch() brings back; work queued from here on may read it. REQUIRES: fetch(segment).
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
  void copy(Slot& slot, at::Tensor& to, const at::Tensor& from);

  at::Device device_;
  CopyStream copies_;
  std::vector<Slot> slots_;
};

}  // namespace kiln
