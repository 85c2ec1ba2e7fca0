// The options of training by their names: as JSON, in recipes, in config.toml and as a command to paste.
#pragma once
#include <string>
#include <vector>

#include "core/json.h"
#include "run/train_options.h"

namespace kiln {

// Sets one option from a recipe's value. Throws Error: an unknown name (with the nearest known one), a wrong
// type.
void set_option(TrainOptions& options, const std::string& name, const nlohmann::json& value);

// Returns every option: {"max-steps": 400000, ...}.
nlohmann::json to_json(const TrainOptions& options);
// Returns a value as it is written in a recipe.
std::string toml_value(const nlohmann::json& value);
// Returns the options as a recipe that --recipe reads back, without stages (run/stage_options.h).
std::string to_toml(const TrainOptions& options);

// Returns the side in pixels of the pictures that the model is made for. Throws Error for an unknown name and
// a config that does not fit.
int64_t own_image_size(const ModelOptions& model);

// Lists options that differ between a saved run and this command, by what they do to it. An option that the
// saved run lacks, because an older program wrote it, had its default.
struct OptionChanges {
  std::vector<std::string> refused, warned;  // "lr (0.0001 -> 0.0002)"
};
OptionChanges compare_options(const nlohmann::json& saved, const nlohmann::json& now);

// Returns "kiln train --model ...", quoted for a shell, with every option that the command would not have
// without it: a model brings its size of pictures and its published settings (run/published_settings.h).
std::string command_line(const TrainOptions& options);

}  // namespace kiln
