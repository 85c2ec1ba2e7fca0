// What a process that trains on a CPU holds beside the tensors and arrays of its plan.
#pragma once
#include <cstdint>

#include "plan/price/machine_profile.h"
#include "run/train_options.h"

namespace kiln {

struct ProcessMemory {
  int64_t bytes = 0;
  double share = 0;  // of the tensors
};

// A process that keeps to a budget, as this one does once return_freed_memory() was called. Measures it with
// code, threads and kernels of a step in memory: after a step of a model so small that its tensors do not
// count. REQUIRES: return_freed_memory() was called; the process has the threads that it will train with.
ProcessMemory frugal_process(const TrainOptions& options);

// A process that keeps freed memory for its next use.
ProcessMemory keeping_process(const MachineProfile& machine);

}  // namespace kiln
