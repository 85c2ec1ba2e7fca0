// What a run needs beyond its options.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "ops/op_recorder.h"
#include "parallel/ranks/process_group.h"
#include "run/train_options.h"

namespace kiln {

// What the plan of a stage chooses and predicts.
struct StageFit {
  TrainOptions options;                // with memory choices made
  nlohmann::json predicted = nullptr;  // as in RunContext
  std::string summary;                 // one line for people; may be empty
};

struct RunContext {
  // The figures of a plan (watch/prediction.h), for plan.json and the report.
  nlohmann::json predicted = nullptr;
  // FLOP/s of matrix products in the data sheet of this rank's device, for the MFU; 0: unknown.
  double data_sheet_flops = 0;
  // Records a step past the warm-up, with times and values; rank 0 writes RUN/precision.json from it
  // (watch/precision_audit.h).
  bool audits_precision = false;
  // Takes the timed operations of rank 0's second step, which is still a warm-up. Null, or with --cuda-graph,
  // which records that step: nothing is timed.
  std::function<void(std::vector<OpRecord>)> on_timed_operations{};
  // Whether the last state of the run is saved. A probe may leave this out.
  bool saves_the_end = true;
  // Chooses the memory of a stage, or refuses what does not fit. Called for every stage ahead before the
  // first one is trained. A collective; throws Error. Null: the options stay as they are.
  std::function<StageFit(const TrainOptions&)> fit{};
  // Stages that follow the newest checkpoint (--continue-with). Empty: those of the options.
  std::vector<StageOptions> ahead{};
  // The ranks that train together, with this one among them (train/loop.h).
  std::shared_ptr<ProcessGroup> group = std::make_shared<ProcessGroup>();
};

}  // namespace kiln
