// `kiln train`: everything around the step, in order.
#pragma once
#include "train/stages/run_context.h"

namespace kiln {

// Trains options.out stage by stage, from its newest complete checkpoint or from the start, until
// --max-steps, --max-minutes or a stop signal. The last state of each stage is checkpointed. Throws Error:
// options or data that do not fit, a run folder that holds another run, a full disk, too many non-finite
// steps in a row (the last good checkpoint stays). Every rank calls it. Only rank 0 writes and prints, and an
// error of one rank ends all.
void train(const TrainOptions& options, const RunContext& context = {});

}  // namespace kiln
