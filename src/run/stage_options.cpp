#include "run/stage_options.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "core/text/json_text.h"
#include "core/text/nearest_name.h"
#include "core/text/split.h"
#include "run/option_values.h"

namespace kiln {

namespace {

// Returns a positive number of a recipe, integer or not. Throws Error.
double positive(const std::string& key, const nlohmann::json& value) {
  if (!value.is_number() || !(value.get<double>() > 0))
    fail("train", "{} expects a positive number, got {}", key, brief(value));
  return value.get<double>();
}

void set_setting(StageOptions& stage, const std::string& key, const nlohmann::json& value) {
  TrainOptions checked;
  set_option(checked, key, value);
  stage.settings[key] = value;
}

// Sets the first store as --data and the others as --more-data.
void set_data(StageOptions& stage, const nlohmann::json& stores) {
  if (stores.empty()) fail("train", "data expects a store or a list of stores, got []");
  set_setting(stage, "data", stores.front());
  set_setting(stage, "more-data", nlohmann::json(stores.begin() + 1, stores.end()));
}

}  // namespace

const std::vector<std::string>& stage_option_names() {
  static const std::vector<std::string> names = words_in(
      "data more-data data-weights autoencoder text image-size enlarge flip draw-posterior "
      "text-dropout-prob lr lr-schedule lr-warmup-steps lr-warmup min-lr-ratio position-scale flow-shift "
      "micro-batch "
      "recompute offload-activations validation-data");
  return names;
}

void set_stage_key(StageOptions& stage, const std::string& key, const nlohmann::json& value) {
  if (key == "name") {
    if (!value.is_string()) fail("train", "name expects a string, got {}", brief(value));
    stage.name = value;
  } else if (key == "epochs") {
    stage.epochs = positive(key, value);
  } else if (key == "steps") {
    positive(key, value);
    if (!is_integer(value)) fail("train", "steps expects an integer, got {}", brief(value));
    stage.steps = value;
  } else if (key == "data" && value.is_array()) {
    set_data(stage, value);
  } else {
    std::vector<std::string> names = stage_option_names();
    names.insert(names.end(), {"name", "epochs", "steps"});
    if (std::ranges::find(names, key) == names.end())
      fail("train", "a stage cannot set '{}': give it for the whole run, or did you mean '{}'?", key,
           nearest_name(key, names));
    set_setting(stage, key, value);
  }
}

void check_stage(const StageOptions& stage, const std::string& who) {
  if (stage.epochs > 0 && stage.steps > 0)
    fail("train", "{} has epochs {:g} and steps {}: give one", who, stage.epochs, stage.steps);
  if (stage.epochs == 0 && stage.steps == 0) fail("train", "{} has no end: give it epochs or steps", who);
}

TrainOptions options_of_stage(const TrainOptions& run, size_t index) {
  TrainOptions options = run;
  options.stages.clear();
  if (run.stages.empty()) return options;
  const StageOptions& stage = run.stages.at(index);
  check_stage(stage, stage_name(stage, index));
  if (index > 0) options.lr.warmup_steps = 0;
  if (stage.settings.contains("data") && !stage.settings.contains("more-data")) options.data.more.clear();
  if (stage.settings.contains("data") && !stage.settings.contains("data-weights"))
    options.data.weights.clear();
  for (const auto& [name, value] : stage.settings.items()) set_option(options, name, value);
  options.epochs = stage.epochs;
  return options;
}

std::string stage_name(const StageOptions& stage, size_t index) {
  return fmt::format("stage {}{}", index + 1, stage.name.empty() ? "" : fmt::format(" ({})", stage.name));
}

nlohmann::json stage_settings(const TrainOptions& of_stage) {
  const nlohmann::json all = to_json(of_stage);
  nlohmann::json settings = nlohmann::json::object();
  for (const std::string& name : stage_option_names()) settings[name] = all.at(name);
  return settings;
}

std::string recipe_of(const TrainOptions& run) {
  std::string toml = to_toml(run);
  for (const StageOptions& stage : run.stages) {
    toml += "\n[[stage]]\n";
    const nlohmann::json keys = to_json(stage);
    for (const auto& [key, value] : keys.items()) toml += fmt::format("{} = {}\n", key, toml_value(value));
  }
  return toml;
}

nlohmann::json to_json(const StageOptions& stage) {
  nlohmann::json json = stage.settings;
  if (!stage.name.empty()) json["name"] = stage.name;
  if (stage.epochs > 0) json["epochs"] = stage.epochs;
  if (stage.steps > 0) json["steps"] = stage.steps;
  return json;
}

StageOptions stage_from_json(const nlohmann::json& json) {
  StageOptions stage;
  for (const auto& [key, value] : json.items()) set_stage_key(stage, key, value);
  return stage;
}

}  // namespace kiln
