// The stages of a run: which are done, which one is under way, what lies ahead. A run without [[stage]]s has
// one stage.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "parallel/ranks/process_group.h"
#include "run/stage_options.h"
#include "train/dataset/store_data.h"

namespace kiln {

struct Stage {
  std::string name;  // "stage 2 (large)"
  // These are of this stage alone. max_steps is where it ends, counted from the beginning of the run.
  TrainOptions options;
  int64_t first_step = 0;     // where it begins
  int64_t num_samples = 0;    // in a pass over its data, with weights; 0: endless
  std::string identity = {};  // of its data, once the stage has begun

  int64_t last_step() const { return options.max_steps; }
  int64_t num_steps() const { return last_step() - first_step; }
};

struct StagePlan {
  std::vector<Stage> stages;
  TrainOptions run;               // what they were made from; without stages they are one
  std::string model_config;       // JSON of the first of several stages; the others train the same model
  nlohmann::json continued_with;  // what --continue-with added last, or null
  int64_t step = 0;               // of the newest checkpoint; 0: none
  size_t current = 0;             // the stage to train now
  // How the stages ahead differ from what the newest checkpoint says of them, and what a stage's stores have
  // grown by, one line each.
  std::vector<std::string> changes, notes;

  bool is_staged() const { return !run.stages.empty(); }
  const Stage& stage() const { return stages[current]; }
  bool is_last() const { return current + 1 == stages.size(); }
  // Adds to `config` what checkpoints keep of stages; nothing for a run without stages. `identity` names the
  // data of the stage under way.
  void record(nlohmann::json& config, const std::string& identity) const;
};

// Plans the stages from the newest checkpoint of `run` and from the data. `ahead` are the stages of
// --continue-with: the stage under way ends at the newest checkpoint and these follow. Stages that have begun
// take from each store the parts that they began with. Throws Error on every rank: a change of what is done,
// data that are not there, nothing to resume from. A collective.
StagePlan plan_stages(const TrainOptions& run, const std::vector<StageOptions>& ahead, ProcessGroup& group);

// Returns the config of the model for the options and their data. Throws Error: data that are not there.
nlohmann::json model_config_of(const TrainOptions& options);

// Checks all stages before the first of several is trained. Throws Error, in one line that names the stage:
// stores that are not there, latents or captions of other encoders, a size that the model cannot take.
void check_stages(const StagePlan& plan);

}  // namespace kiln
