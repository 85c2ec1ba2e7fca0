// The stages of a run: parts with data, length and settings of their own, one after another.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/train_options.h"

namespace kiln {

// Names of the options that a stage may set beside name, epochs and steps.
const std::vector<std::string>& stage_option_names();

// Sets one key of a [[stage]]. `data` may be a list: the first is --data, the others are --more-data. Throws
// Error: no key of a stage, or a value of a wrong type.
void set_stage_key(StageOptions& stage, const std::string& key, const nlohmann::json& value);
// After all its keys. `who`: "stage 2". Throws Error: neither epochs nor steps, or both.
void check_stage(const StageOptions& stage, const std::string& who);

// The options of stage `index` as those of a run without stages; its length is left open. What a stage does
// not set is as the run has it, but for a warm-up and --weights, which are of the beginning of the run. A run
// without stages is its own only stage. Throws Error naming the stage.
TrainOptions options_of_stage(const TrainOptions& run, size_t index);
// "stage 2", and its name if it has one.
std::string stage_name(const StageOptions& stage, size_t index);

// What a stage's settings come to: {"lr": 0.0001, ...} of every option that a stage may set.
nlohmann::json stage_settings(const TrainOptions& of_stage);

// A run's options and its stages as a recipe, which --recipe reads back.
std::string recipe_of(const TrainOptions& run);
nlohmann::json to_json(const StageOptions& stage);
StageOptions stage_from_json(const nlohmann::json& json);

}  // namespace kiln
