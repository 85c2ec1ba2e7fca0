// `kiln train`: everything around the step, in order.
#pragma once
#include "train/train_config.h"

namespace kiln {

// Trains options.out from its newest complete checkpoint, or from the start, until --max-steps, --max-minutes
// or a stop signal; the last state is always checkpointed. Throws Error: options or data that do not fit, a
// run folder that holds another run, a full disk, too many non-finite steps in a row (the last good
// checkpoint stays).
void train(const TrainOptions& options);

}  // namespace kiln
