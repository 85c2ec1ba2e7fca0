// The stages of a run as they stand: which are done, which one is under way, what lies ahead. A run without
// [[stage]]s is a run of one.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parallel/ranks/process_group.h"
#include "run/stage_options.h"
#include "train/store_data.h"

namespace kiln {

struct Stage {
  std::string name;         // "stage 2 (large)"
  TrainOptions options;     // of it alone; max_steps is where it ends, counted from the beginning of the run
  int64_t first_step = 0;   // where it begins
  int64_t num_samples = 0;  // of a pass over its data, weights counted; 0: endless
  std::string identity = {};  // of its data, once it has begun

  int64_t last_step() const { return options.max_steps; }
  int64_t num_steps() const { return last_step() - first_step; }
};

struct StagePlan {
  std::vector<Stage> stages;
  TrainOptions run;               // what they were made of; no stages: they are one
  std::string model_config;       // JSON, of the first of several stages: others train the same model
  nlohmann::json continued_with;  // what --continue-with added last; null: nothing
  int64_t step = 0;               // of the newest checkpoint; 0: there is none
  size_t current = 0;             // the stage to train now
  // What lies ahead is other than the newest checkpoint foresaw, and what a stage's stores have grown by: one
  // line each.
  std::vector<std::string> changes, notes;

  bool is_staged() const { return !run.stages.empty(); }
  const Stage& stage() const { return stages[current]; }
  bool is_last() const { return current + 1 == stages.size(); }
  // Adds what checkpoints keep of stages to `config`; nothing for a run without. `identity`: of the data of
  // the stage under way.
  void record(nlohmann::json& config, const std::string& identity) const;
};

// Looks at the newest checkpoint of `run` and at the data. `ahead`: what --continue-with says; the stage
// under way ends where the newest checkpoint stands and these follow. Stages that have begun take of each
// store the parts that they began with. Throws Error on every rank: what is done would be other than it was,
// data that are not there, nothing to go on from. A collective.
StagePlan plan_stages(const TrainOptions& run, const std::vector<StageOptions>& ahead, ProcessGroup& group);

// The config of the model that the options and their data come to. Throws Error: data that are not there.
nlohmann::json model_config_of(const TrainOptions& options);

// Before the first of several stages is trained: stores that are not there, latents or captions of other
// encoders, a size that the model cannot take, each in one line that names the stage. Throws Error.
void check_stages(const StagePlan& plan);

}  // namespace kiln
