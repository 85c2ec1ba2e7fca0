// What a process that trains on a CPU holds beside the tensors and arrays of its plan.
#pragma once
#include <cstdint>

#include "plan/machine_profile.h"
#include "train/train_config.h"

namespace kiln {

struct ProcessMemory {
  int64_t bytes = 0;
  double share = 0;  // of the tensors
};

// Of one that keeps to a budget: from now on this one gives freed memory back to the system at once. Measured
// once code, threads and kernels of a step are in memory: after a step of a model so small that its tensors
// do not count. REQUIRES: the process has the threads that it will train with.
ProcessMemory frugal_process(const TrainOptions& options);

// Of one that keeps freed memory for its next use.
ProcessMemory keeping_process(const MachineProfile& machine);

}  // namespace kiln
