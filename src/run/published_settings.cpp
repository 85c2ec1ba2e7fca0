#include "run/published_settings.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/error.h"
#include "diffusion/objective.h"
#include "diffusion/sampler.h"
#include "diffusion/scheduler_config.h"
#include "models/registry.h"
#include "run/option_values.h"

namespace kiln {

namespace {

using nlohmann::json;

// Options that a run which is resumed keeps where the command leaves them open. Those of drawing, if it drew.
constexpr const char* kKept[] = {"objective",  "timestep-sampling", "weighting",  "logit-mean",
                                 "logit-std",  "flow-shift",        "flow-times", "beta-schedule",
                                 "beta-start", "beta-end"};
constexpr const char* kKeptOfDrawing[] = {"sampler", "num-sampling-steps", "cfg-scale"};

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

// Returns how grids and evaluations are drawn, if the run draws any.
std::optional<Drawing> drawing_of_run(const TrainOptions& options) {
  if (options.samples.every == 0 && options.evaluation.every == 0) return std::nullopt;
  if (!is_objective(options.objective.name)) return std::nullopt;  // refused later
  return published_drawing(options.model.name, objective_config(options.objective.name),
                           options.samples.sampler);
}

json settings_of(const Drawing& drawing) {
  return {{"sampler", drawing.sampler},
          {"num-sampling-steps", drawing.num_sampling_steps},
          {"cfg-scale", drawing.cfg_scale}};
}

// Returns what the recorded run had of these options.
template <size_t N>
json kept(const json& recorded, const char* const (&names)[N]) {
  const json defaults = to_json(TrainOptions{});  // what an older program did not record
  json settings = json::object();
  for (const char* name : names) settings[name] = recorded.value(name, defaults.at(name));
  return settings;
}

bool drew(const json& recorded) {
  return recorded.value("sample-every", int64_t{0}) > 0 || recorded.value("evaluate-every", int64_t{0}) > 0;
}

// Sets the options that are not given.
void set_open(TrainOptions& options, const json& settings, const std::set<std::string>& given) {
  for (const auto& [name, value] : settings.items())
    if (!given.contains(name)) set_option(options, name, value);
}

// Null if neither tells.
json known_objective(const ModelRecord& record, const json& scheduler, const std::string& model) {
  if (record.objective.is_object() || !scheduler.is_object()) return record.objective;
  json told = objective_of_scheduler(scheduler);
  if (told.is_null()) return told;
  json published = published_objective_config(model, "");
  return have_same_schedule(told, published) ? published : told;
}

}  // namespace

std::string take_published_settings(TrainOptions& options, const std::set<std::string>& given,
                                    const json& recorded) {
  if (!is_known(options.model.name)) return "";
  const json before = to_json(options), defaults = to_json(TrainOptions{});
  const bool resumes = recorded.is_object();
  set_open(options,
           resumes ? kept(recorded, kKept) : published_objective(options, given.contains("objective")),
           given);
  std::set<std::string> usual;  // what this sets without that anyone has published it
  if (resumes && drew(recorded)) {
    set_open(options, kept(recorded, kKeptOfDrawing), given);
  } else if (const std::optional<Drawing> drawing = drawing_of_run(options)) {
    set_open(options, settings_of(*drawing), given);
    if (!drawing->is_published) usual = {"sampler", "num-sampling-steps"};
  }
  std::string text;
  const json after = to_json(options);
  for (const auto& [name, value] : after.items())
    if (value != before.at(name) && value != defaults.at(name) && !usual.contains(name))
      text += fmt::format("{}--{} {}", text.empty() ? "" : " ", name,
                          value.is_string() ? value.get<std::string>() : value.dump());
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

Drawing published_drawing(const std::string& model, const json& objective, const std::string& sampler) {
  const PublishedSampling* const row = row_of(family_of(model).sampling, model);
  const PublishedSampling published = row != nullptr ? *row : PublishedSampling{};
  Drawing drawing{.sampler = sampler, .cfg_scale = published.cfg_scale};
  if (sampler.empty())
    drawing.sampler = samples(published.sampler, objective) ? published.sampler : default_sampler(objective);
  drawing.is_published = drawing.sampler == published.sampler;
  drawing.num_sampling_steps = drawing.is_published ? published.steps : usual_sampling_steps(drawing.sampler);
  return drawing;
}

Drawing drawing_of(const ModelRecord& record, const json& objective, const std::string& sampler) {
  const ModelRecord::DrawingInfo& recorded = record.drawing;
  const bool is_fit = !recorded.sampler.empty() && samples(recorded.sampler, objective);
  const std::string wanted = sampler.empty() && is_fit ? recorded.sampler : sampler;
  Drawing drawing = published_drawing(record.model, objective, wanted);
  if (recorded.sampler.empty()) return drawing;
  drawing.cfg_scale = recorded.cfg_scale;
  drawing.is_recorded = drawing.sampler == recorded.sampler;
  if (drawing.is_recorded) drawing.num_sampling_steps = recorded.num_sampling_steps;
  return drawing;
}

json objective_of(const ModelRecord& record, const json& scheduler, const std::string& model,
                  const GivenObjective& given) {
  json objective = known_objective(record, scheduler, model);
  if (!given.name.empty()) {
    const json known = std::exchange(objective, published_objective_config(model, given.name));
    if (known.is_object() && known.at("type") == objective.at("type")) {
      const json asked = std::exchange(objective, known);
      if (asked.contains("prediction_type")) objective["prediction_type"] = asked["prediction_type"];
    }
  }
  if (!given.flow_shift) return objective;
  if (objective.is_null()) objective = published_objective_config(model, "");
  if (objective.at("type") != "flow")
    fail("objective", "--flow-shift is for --objective flow, and these weights are of {}: leave it out",
         objective_text(objective));
  objective["shift"] = *given.flow_shift;
  make_objective(objective);
  return objective;
}

json options_of(const json& objective) {
  constexpr std::pair<const char*, const char*> kKeys[] = {{"timestep-sampling", "timestep_sampling"},
                                                           {"weighting", "weighting"},
                                                           {"logit-mean", "logit_mean"},
                                                           {"logit-std", "logit_std"},
                                                           {"flow-shift", "shift"},
                                                           {"flow-times", "mode"},
                                                           {"beta-schedule", "beta_schedule"},
                                                           {"beta-start", "beta_start"},
                                                           {"beta-end", "beta_end"}};
  for (const std::string& name : objective_names()) {
    const json named = objective_config(name);
    const auto differs = [&](const char* key) { return named.value(key, "") != objective.value(key, ""); };
    if (differs("type") || differs("loss") || differs("prediction_type")) continue;
    json settings = {{"objective", name}};
    for (const auto& [option, key] : kKeys)
      if (objective.contains(key)) settings[option] = objective.at(key);
    return settings;
  }
  return json::object();
}

std::string objective_text(const json& objective) {
  std::string type = objective.at("type");
  if (type == "flow") return fmt::format("flow, shift {:g}", objective.value("shift", 1.0));
  if (type != "ddpm") return type;
  return fmt::format("{}, {}", objective.value("prediction_type", ""), objective.value("beta_schedule", ""));
}

ModelRecord::DrawingInfo drawing_info(const Drawing& drawing, const DenoiserShape& shape) {
  return {.sampler = drawing.sampler,
          .num_sampling_steps = drawing.num_sampling_steps,
          .cfg_scale = drawing.cfg_scale,
          .guided_channels = shape.predicts_sigma() ? "model" : "all",
          .unconditional = unconditional_name(shape.conditioning)};
}

}  // namespace kiln
