// `kiln train`: everything around the step, in order.
#pragma once
#include "train/stages/run_context.h"

namespace kiln {

// Trains options.out from its newest complete checkpoint, or from the start, until --max-steps, --max-minutes
// or a stop signal, stage by stage where it has several; the last state of each is checkpointed. Throws
// Error: options or data that do not fit, a run folder that holds another run, a full disk, too many
// non-finite steps in a row (the last good checkpoint stays). Every rank calls it; only rank 0 writes and
// prints, and an error of one ends all.
void train(const TrainOptions& options, const RunContext& context = {});

}  // namespace kiln
