#include "parallel/offload/device_wait.h"

#include "core/aten.h"
#include "parallel/offload/host_memory.h"

namespace kiln {

void wait_for(const c10::Event& event, ProcessGroup& group, const std::string& what) {
  if (group.world_size() == 1)
    event.synchronize();
  else
    group.wait_until([&] { return event.query(); }, what);
}

void wait_for_device(at::Device device, ProcessGroup& group, const std::string& what) {
  if (group.world_size() == 1) return;
  if (const std::optional<c10::Event> given = record_event(device)) wait_for(*given, group, what);
}

}  // namespace kiln
