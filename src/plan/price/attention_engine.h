// Which of torch's attention kernels a planned GPU takes.
#pragma once
#include "plan/price/machine_profile.h"
#include "run/train_options.h"

namespace kiln {

// True if torch 2.11 takes cuDNN's attention before flash attention on this GPU. It does on GPUs of
// capabilities 9.0 and 10.0 with cuDNN above 9.15.
bool prefers_cudnn_attention(const MachineProfile& machine);

// Returns the options for the dry run of a step, which does not know the GPU: without packed gradients where
// flash attention leaves them apart.
TrainOptions traced_options(TrainOptions options, const MachineProfile& machine);

}  // namespace kiln
