#include "parallel/offload/copy_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/aten.h"

namespace kiln {

CopyStream::CopyStream(at::Device device) : device_(device) {
  if (device.is_cuda()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

c10::Stream CopyStream::compute_stream() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

std::optional<c10::Event> CopyStream::run(const std::function<void()>& copies) const {
  if (!stream_) {
    copies();
    return std::nullopt;
  }
  c10::Event given(device_.type());
  given.record(compute_stream());
  given.block(*stream_);
  {
    const c10::StreamGuard on_copies(*stream_);
    copies();
  }
  std::optional<c10::Event> end(device_.type());
  end->record(*stream_);
  return end;
}

void CopyStream::wait(const std::optional<c10::Event>& end) const {
  if (end) end->block(compute_stream());
}

}  // namespace kiln
