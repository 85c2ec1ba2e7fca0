// Work that a GPU repeats without the host: recorded once, launched as one graph.
#pragma once
#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace kiln {

// A recorded graph. It is not copyable, and its memory lives as long as it does.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Records what `work` enqueues. Tensors that it reads and writes must stay where they are, and it must not
  // read a value on the host. The graph shares its memory with `shares` (null: it has its own), which must
  // never run at the same time; the results of both stay valid. Throws what `work` throws, and throws if the
  // work cannot be recorded. Nothing is recorded then.
  virtual void capture(const std::function<void()>& work, const DeviceGraph* shares = nullptr) = 0;
  // Runs the recorded work on the current stream. REQUIRES: capture() returned.
  virtual void replay() = 0;
};

// Returns null if there are no graphs: on a CPU, or in a build without CUDA.
std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device);

}  // namespace kiln
