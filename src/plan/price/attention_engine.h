// Which of torch's attention kernels a planned GPU takes.
#pragma once
#include "plan/price/machine_profile.h"
#include "run/train_options.h"

namespace kiln {

// Returns the kernels by which torch 2.11 computes the attention of a packed projection on this GPU, in the
// words of kiln probe: "cudnn", "flash" or "memory-efficient". It takes cuDNN's before flash attention on
// GPUs of capabilities 9.0 and 10.0 with cuDNN above 9.15, and not among deterministic algorithms.
const char* attention_engine_of(const MachineProfile& machine, const ComputeOptions& compute);

// Returns the options for the dry run of a step, which does not know the GPU: without packed gradients where
// flash attention leaves them apart.
TrainOptions traced_options(TrainOptions options, const MachineProfile& machine);

}  // namespace kiln
