// Lets the host wait for a device that other ranks may keep waiting: NCCL's collectives hang if a rank is
// gone.
#pragma once
#include <c10/core/Event.h>

#include <string>

#include "parallel/ranks/process_group.h"

namespace kiln {

// Waits for what was queued before the event, and watches the other ranks meanwhile. Throws Error naming
// those that are missing (ProcessGroup::wait_until()). `what`: "a validation".
void wait_for(const c10::Event& event, ProcessGroup& group, const std::string& what);

// The same for all work queued on the current stream of `device`. Call it before the host reads what was
// computed with the weights of all ranks. Does nothing on a CPU or with one rank, where the read itself
// waits.
void wait_for_device(at::Device device, ProcessGroup& group, const std::string& what);

}  // namespace kiln
