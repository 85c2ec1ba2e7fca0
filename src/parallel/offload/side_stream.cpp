#include "parallel/offload/side_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/aten.h"

namespace kiln {

namespace {

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Event end_of(const c10::Stream& stream) {
  c10::Event end(stream.device_type());
  end.record(stream);
  return end;
}

}  // namespace

void wait_on_stream(const std::optional<c10::Event>& end) {
  if (end) end->block(current_stream(end->device()));
}

SideStream::SideStream(at::Device device) : device_(device) {
  if (device.is_cuda()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

SideStream::~SideStream() {
  if (!stream_) return;
  try {
    wait_on_stream(end_of(*stream_));
  } catch (const std::exception&) {  // the device is lost
  }
}

std::optional<c10::Event> SideStream::run(const std::function<void()>& work) const {
  if (!stream_) {
    work();
    return std::nullopt;
  }
  end_of(current_stream(device_)).block(*stream_);
  {
    const c10::StreamGuard on_side(*stream_);
    work();
  }
  return end_of(*stream_);
}

}  // namespace kiln
