// The options of training by their names: as JSON, in recipes and in config.toml.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/train_options.h"

namespace kiln {

// Sets one option from a recipe's value. Throws Error: an unknown name (with the nearest known one), a wrong
// type.
void set_option(TrainOptions& options, const std::string& name, const nlohmann::json& value);

// {"max-steps": 400000, ...}: every option.
nlohmann::json to_json(const TrainOptions& options);
// A value as a recipe has it.
std::string toml_value(const nlohmann::json& value);
// The options as a recipe, which --recipe reads back, but for stages (run/stage_options.h).
std::string to_toml(const TrainOptions& options);

// Names of options that differ between a saved run and this command, by what they do to it. An option that
// the saved run lacks, since an older program wrote it, had its default.
struct OptionChanges {
  std::vector<std::string> refused, warned;  // "lr (0.0001 -> 0.0002)"
};
OptionChanges compare_options(const nlohmann::json& saved, const nlohmann::json& now);

}  // namespace kiln
