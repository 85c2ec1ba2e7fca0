// The stages of a run: parts with data, length and settings of their own, trained one after another.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "run/train_options.h"

namespace kiln {

// Returns the names of the options that a stage may set besides name, epochs and steps.
const std::vector<std::string>& stage_option_names();

// Sets one key of a [[stage]]. `data` may be a list: the first is --data, the others are --more-data. Throws
// Error: not a key of a stage, or a value of a wrong type.
void set_stage_key(StageOptions& stage, const std::string& key, const nlohmann::json& value);
// Called after all keys are set. `who` is "stage 2". Throws Error: neither epochs nor steps, or both.
void check_stage(const StageOptions& stage, const std::string& who);

// Returns the options of stage `index` as those of a run without stages, with its length left open. Settings
// that the stage does not set are the run's, except a warm-up, which only the first stage has. A run without
// stages is its own only stage. Throws Error naming the stage.
TrainOptions options_of_stage(const TrainOptions& run, size_t index);
// Returns "stage 2", with its name if it has one: "stage 2 (large)".
std::string stage_name(const StageOptions& stage, size_t index);

// Returns the values of every option that a stage may set: {"lr": 0.0001, ...}.
nlohmann::json stage_settings(const TrainOptions& of_stage);

// Returns a run's options and its stages as a recipe that --recipe reads back.
std::string recipe_of(const TrainOptions& run);
nlohmann::json to_json(const StageOptions& stage);
StageOptions stage_from_json(const nlohmann::json& json);

}  // namespace kiln
