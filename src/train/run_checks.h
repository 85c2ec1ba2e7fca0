// What a run is warned of, or refused for, before its first step.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "checkpoint/train_state.h"
#include "train/train_config.h"

namespace kiln {

// "--tf32 has no effect on a CPU", one line each.
std::vector<std::string> settings_without_effect(const TrainOptions& options, at::Device device,
                                                 int64_t world_size);

// Whether `options` may go on from a checkpoint. Returns what makes the further bits or the schedule differ
// from those of an uninterrupted run, one line each. `now` has the fields config (the options and the data of
// this command), world_size, machine and num_threads. Throws Error: other settings, other data.
std::vector<std::string> resume_warnings(const TrainOptions& options, const TrainStateInfo& saved,
                                         const TrainStateInfo& now);

}  // namespace kiln
