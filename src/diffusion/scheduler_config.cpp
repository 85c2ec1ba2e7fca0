#include "diffusion/scheduler_config.h"

#include <cmath>

#include "core/json_config.h"

namespace kiln {
namespace {

using nlohmann::json;

// Numbers that may have gone through other programs' f32.
bool are_close(const json& a, const json& b) {
  if (!a.is_number() || !b.is_number()) return a == b;
  return std::abs(a.get<double>() - b.get<double>()) <= 1e-6 * std::abs(b.get<double>());
}

json flow_of(int64_t num_train_timesteps, double shift) {
  return {{"type", "flow"}, {"shift", shift}, {"num_train_timesteps", num_train_timesteps}};
}

// Returns what decides how a model of the objective is drawn.
json drawn_as(const json& objective) {
  const JsonConfig config("objective", objective);
  if (config.get<std::string>("type", "") != "flow") return scheduler_of(objective);
  return flow_of(config.positive("num_train_timesteps", 1000), config.get("shift", 1.0));
}

}  // namespace

json scheduler_of(const json& objective) {
  const JsonConfig config("sampler", objective);
  const int64_t num_train_timesteps = config.positive("num_train_timesteps", 1000);
  json scheduler = {{"num_train_timesteps", num_train_timesteps},
                    {"beta_schedule", config.get<std::string>("beta_schedule", "linear")},
                    {"prediction_type", config.get<std::string>("prediction_type", "epsilon")},
                    {"clip_sample", false}};
  const bool iddpm = config.get<std::string>("type", "") == "iddpm";
  const double scale = iddpm ? 1000.0 / static_cast<double>(num_train_timesteps) : 1.0;
  scheduler["beta_start"] = config.get("beta_start", scale * 0.0001);
  scheduler["beta_end"] = config.get("beta_end", scale * 0.02);
  for (const char* key : {"trained_betas", "rescale_betas_zero_snr"})
    if (config.has(key) && config.at(key) != false) scheduler[key] = config.at(key);
  return scheduler;
}

json objective_of_scheduler(const json& scheduler) {
  const JsonConfig config("scheduler_config.json", scheduler);
  if (config.get(kAssumedKey, false)) return nullptr;
  const int64_t num_train_timesteps = config.positive("num_train_timesteps", 1000);
  const std::string prediction = config.get<std::string>("prediction_type", "epsilon");
  if (config.get<std::string>("_class_name", "").starts_with("FlowMatch"))
    return flow_of(num_train_timesteps, config.get("shift", 1.0));
  if (prediction == "flow_prediction") return flow_of(num_train_timesteps, config.get("flow_shift", 1.0));
  if (prediction != "epsilon" && prediction != "v_prediction" && prediction != "sample") return nullptr;
  json objective = {{"type", "ddpm"},
                    {"prediction_type", prediction},
                    {"beta_schedule", config.get<std::string>("beta_schedule", "linear")},
                    {"beta_start", config.get("beta_start", 0.0001)},
                    {"beta_end", config.get("beta_end", 0.02)},
                    {"num_train_timesteps", num_train_timesteps}};
  for (const char* key : {"trained_betas", "rescale_betas_zero_snr"})
    if (config.has(key) && config.at(key) != false) objective[key] = config.at(key);
  return objective;
}

bool have_same_schedule(const json& objective, const json& other) {
  json a = drawn_as(objective), b = drawn_as(other);
  // Its range is not read where the schedule has a form of its own.
  if (a.value("beta_schedule", "") == "squaredcos_cap_v2")
    for (json* each : {&a, &b}) each->erase("beta_start"), each->erase("beta_end");
  if (a.size() != b.size()) return false;
  for (const auto& [key, value] : a.items())
    if (!b.contains(key) || !are_close(value, b.at(key))) return false;
  return true;
}

}  // namespace kiln
