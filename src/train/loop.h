// `kiln train`: everything around the step, in order.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "parallel/ranks/process_group.h"
#include "run/train_options.h"

namespace kiln {

// What a run needs beyond its options.
struct RunContext {
  // The figures of a plan (watch/prediction.h), for plan.json and the report.
  nlohmann::json predicted = nullptr;
  // FLOP/s of matrix products by the data sheet of this rank's device, for the MFU; 0: there is none.
  double data_sheet_flops = 0;
  // The last state is saved where the run keeps it; a probe's may be left out.
  bool saves_the_end = true;
  // The ranks that train together, this one among them (train/run_ranks.h).
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();
};

// Trains options.out from its newest complete checkpoint, or from the start, until --max-steps, --max-minutes
// or a stop signal; the last state is always checkpointed. Throws Error: options or data that do not fit, a
// run folder that holds another run, a full disk, too many non-finite steps in a row (the last good
// checkpoint stays). Every rank calls it; only rank 0 writes and prints, and an error of one ends all.
void train(const TrainOptions& options, const RunContext& context = {});

}  // namespace kiln
