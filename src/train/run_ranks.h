// The ranks of a training run: how they meet, and what has to be the same on all of them.
#pragma once
#include <memory>

#include "parallel/joining.h"
#include "train/train_config.h"

namespace kiln {

// How many ranks this process has to launch (--nproc) instead of training; 0 when it is one of the ranks.
// Throws Error: --nproc does not fit what a launcher has started.
int64_t ranks_to_launch(const TrainOptions& options);

// Meets the other ranks that the environment speaks of, and compares versions and options. Throws Error.
std::shared_ptr<ProcessGroup> join_ranks(const TrainOptions& options);

}  // namespace kiln
