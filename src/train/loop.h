// `kiln train`: everything around the step, in order.
#pragma once
#include <nlohmann/json.hpp>

#include "train/train_config.h"

namespace kiln {

// What the caller knows about a run, and wants of it, beyond its options.
struct RunContext {
  nlohmann::json predicted =
      nullptr;       // the figures of a plan (train/prediction.h), for plan.json and the report
  bool save = true;  // false: no checkpoints and no report (probe)
};

// Trains options.out from its newest complete checkpoint, or from the start, until --max-steps, --max-minutes
// or a stop signal; the last state is always checkpointed. Throws Error: options or data that do not fit, a
// run folder that holds another run, a full disk, too many non-finite steps in a row (the last good
// checkpoint stays).
void train(const TrainOptions& options, const RunContext& context = {});

}  // namespace kiln
