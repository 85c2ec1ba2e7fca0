// Work of a device that runs beside its compute: copies to and from the host, updates.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <optional>

namespace kiln {

// Makes work that is queued on the current stream from now on begin after `end`. Nothing: it begins at once.
void wait_on_stream(const std::optional<c10::Event>& end);

// A separate stream on CUDA. Elsewhere work is done when it returns, and there is nothing to wait for.
class SideStream {
 public:
  explicit SideStream(at::Device device);
  // The compute stream waits, so what comes after may free memory that the work uses.
  ~SideStream();
  SideStream(const SideStream&) = delete;

  // Queues `work` to begin after what was queued on the compute stream so far. Returns an event at its end.
  std::optional<c10::Event> run(const std::function<void()>& work) const;

 private:
  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace kiln
