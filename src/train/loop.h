// `kiln train`: how its ranks meet, and everything around the step, in order.
#pragma once
#include <memory>
#include <string>

#include "parallel/ranks/agreement.h"
#include "run/train_options.h"
#include "train/stages/run_context.h"

namespace kiln {

// Trains options.out stage by stage, from its newest complete checkpoint or from the start, until
// --max-steps, --max-minutes or a stop signal. The last state of each stage is checkpointed. Throws Error:
// options or data that do not fit, a run folder that holds another run, a full disk, too many non-finite
// steps in a row (the last good checkpoint stays). Every rank calls it. Only rank 0 writes and prints, and an
// error of one rank ends all.
void train(const TrainOptions& options, const RunContext& context = {});

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
