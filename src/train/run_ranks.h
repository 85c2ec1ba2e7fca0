// The ranks of a training run: how they meet, and what must be the same on all of them.
#pragma once
#include <memory>
#include <string>

#include "parallel/ranks/joining.h"
#include "run/train_options.h"

namespace kiln {

// Returns how many ranks this process has to launch (--nproc) instead of training; 0 if it is one of the
// ranks. Throws Error: --nproc does not fit what a launcher has started; options that cannot be launched.
int64_t ranks_to_launch(const TrainOptions& options);

// Connects to the other ranks that the environment names, which have to run the same. `build` identifies this
// program. Throws Error on every rank: options that are impossible on any of them, or have no device there.
std::shared_ptr<ProcessGroup> join_ranks(const TrainOptions& options, const std::string& build);

// Throws Error on every rank, naming what differs, unless all have the same build, the same kind of device
// and the same options. Options of a single machine may differ. A collective.
void require_same_run(ProcessGroup& group, const TrainOptions& options, const std::string& build,
                      at::Device device);

}  // namespace kiln
