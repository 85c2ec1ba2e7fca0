// Waits of the host for a device that other ranks may keep waiting: NCCL's collectives hang where one is
// gone.
#pragma once
#include <c10/core/Event.h>

#include <string>

#include "parallel/ranks/process_group.h"

namespace kiln {

// Waits for what was queued before the event, looking after the other ranks meanwhile. Throws Error naming
// those that are missing (ProcessGroup::wait_until()). `what`: "a validation".
void wait_for(const c10::Event& event, ProcessGroup& group, const std::string& what);

// The same for all that the current stream of `device` was given, before the host reads what was computed
// with the weights of all ranks. Not on a CPU, nor on one rank: what reads waits by itself.
void wait_for_device(at::Device device, ProcessGroup& group, const std::string& what);

}  // namespace kiln
