// The memory of a plan: by phase and kind, in each place.
#pragma once
#include "plan/plan.h"

namespace kiln {

// Fills in what of `plan` is in bytes of memory, from its options, machine, data and batches. `trace`: of one
// of its ranks.
void add_memory(Plan& plan, const StepTrace& trace);

// Outside the allocator, on the device of each of so many ranks.
int64_t communication_bytes(const MachineProfile& machine, int64_t gpus);

}  // namespace kiln
