#include "run/published_settings.h"

#include <algorithm>

#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "models/registry.h"
#include "run/option_values.h"

namespace kiln {

namespace {

using nlohmann::json;

// Options that a run which is resumed keeps where the command leaves them open.
constexpr const char* kKept[] = {"objective",  "timestep-sampling", "weighting",  "logit-mean",
                                 "logit-std",  "flow-shift",        "flow-times", "beta-schedule",
                                 "beta-start", "beta-end"};

bool is_known(const std::string& model) {
  const std::vector<std::string> names = denoiser_names();
  return std::ranges::find(names, model) != names.end();
}

bool is_objective(const std::string& name) {
  const std::vector<std::string> names = objective_names();
  return std::ranges::find(names, name) != names.end();
}

bool are_of_one_type(const std::string& objective, const std::string& other) {
  return is_objective(objective) &&
         objective_config(objective).at("type") == objective_config(other).at("type");
}

// Returns the published objective and schedule, as far as they go with a given objective.
json published_objective(const TrainOptions& options, bool is_given) {
  const PublishedObjective* const row = row_of(family_of(options.model.name).objectives, options.model.name);
  if (row == nullptr) return json::object();
  json settings = json::parse(row->options);
  if (is_given && !are_of_one_type(options.objective.name, settings.at("objective"))) return json::object();
  return settings;
}

json published_grids(const TrainOptions& options) {
  if (options.samples.every == 0 && options.evaluation.every == 0) return json::object();
  if (!is_objective(options.objective.name)) return json::object();  // refused later
  const Drawing drawing = published_drawing(options.model.name, objective_config(options.objective.name));
  json settings = {{"cfg-scale", drawing.cfg_scale}};
  if (!options.samples.sampler.empty()) return settings;
  settings["sampler"] = drawing.sampler;
  settings["num-sampling-steps"] = drawing.num_sampling_steps;
  return settings;
}

// Sets the options that are not given.
void set_open(TrainOptions& options, const json& settings, const std::set<std::string>& given) {
  for (const auto& [name, value] : settings.items())
    if (!given.contains(name)) set_option(options, name, value);
}

}  // namespace

std::string take_published_settings(TrainOptions& options, const std::set<std::string>& given,
                                    const json& recorded) {
  if (!is_known(options.model.name)) return "";
  const json before = to_json(options), defaults = to_json(TrainOptions{});
  json settings = published_objective(options, given.contains("objective"));
  if (recorded.is_object())
    for (const char* name : kKept) settings[name] = recorded.value(name, defaults.value(name, json()));
  set_open(options, settings, given);
  const json grids = published_grids(options);
  set_open(options, grids, given);
  if (!settings.empty()) settings.update(grids);  // else the sampler is the usual one, not a published one
  std::string text;
  const json after = to_json(options);
  for (const auto& [name, value] : after.items()) {
    if (!settings.contains(name) || value == before.at(name) || value == defaults.at(name)) continue;
    text += fmt::format("{}--{} {}", text.empty() ? "" : " ", name,
                        value.is_string() ? value.get<std::string>() : value.dump());
  }
  return text;
}

json published_objective_config(const std::string& model, const std::string& objective) {
  TrainOptions options;
  options.model.name = model;
  if (!objective.empty()) options.objective.name = objective;
  set_open(options, published_objective(options, !objective.empty()),
           objective.empty() ? std::set<std::string>() : std::set<std::string>{"objective"});
  return objective_config_of(options.objective);
}

Drawing published_drawing(const std::string& model, const json& objective) {
  const PublishedSampling* const row = row_of(family_of(model).sampling, model);
  const PublishedSampling published = row != nullptr ? *row : PublishedSampling{};
  if (samples(published.sampler, objective))
    return {.sampler = published.sampler,
            .num_sampling_steps = published.steps,
            .cfg_scale = published.cfg_scale};
  const std::string sampler = default_sampler(objective);
  return {.sampler = sampler,
          .num_sampling_steps = usual_sampling_steps(sampler),
          .cfg_scale = published.cfg_scale};
}

}  // namespace kiln
