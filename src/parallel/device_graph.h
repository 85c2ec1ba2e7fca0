// Work that a GPU repeats without the host: recorded once, launched as one graph.
#pragma once
#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace kiln {

// Not copyable; its memory lives as long as it does.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Records what `work` enqueues. Tensors that it reads and writes must stay where they are; it must not look
  // at a value. Its memory is that of `shares`, too (null: its own), which never runs at the same time; the
  // results of both stay. Throws what `work` throws, and for work that cannot be recorded; nothing is
  // recorded then.
  virtual void capture(const std::function<void()>& work, const DeviceGraph* shares = nullptr) = 0;
  // Runs the recorded work on the current stream. REQUIRES: capture() returned.
  virtual void replay() = 0;
};

// Null where graphs are not to be had: on a CPU, or in a build without CUDA.
std::unique_ptr<DeviceGraph> make_device_graph(c10::Device device);

}  // namespace kiln
