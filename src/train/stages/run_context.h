// What a run needs beyond its options.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"
#include "run/train_options.h"
#include "step/span_recorder.h"

namespace kiln {

// Records the operations of a step on a device.
using MakeOpSource = std::function<std::unique_ptr<OpSource>(at::Device)>;

// What the plan of a stage chooses and foretells.
struct StageFit {
  TrainOptions options;                // memory choices made
  nlohmann::json predicted = nullptr;  // as of RunContext
  std::string summary;                 // one line for people; may be empty
};

struct RunContext {
  // The figures of a plan (watch/prediction.h), for plan.json and the report.
  nlohmann::json predicted = nullptr;
  // FLOP/s of matrix products by the data sheet of this rank's device, for the MFU; 0: there is none.
  double data_sheet_flops = 0;
  // Rank 0 writes RUN/precision.json of a step past the warm-up from what this records: times and values
  // checked (watch/precision_audit.h). Null: there is no audit.
  MakeOpSource audit_ops = nullptr;
  // The last state is saved where the run keeps it; a probe's may be left out.
  bool saves_the_end = true;
  // Chooses the memory of a stage, or refuses what does not fit. It is asked of every stage ahead
  // before the first one is trained. A collective; throws Error. Null: options are as they should be.
  std::function<StageFit(const TrainOptions&)> fit{};
  // Stages that follow the newest checkpoint (--continue-with); empty: as the options say.
  std::vector<StageOptions> ahead{};
  // The ranks that train together, this one among them (train/run_ranks.h).
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();
};

}  // namespace kiln
