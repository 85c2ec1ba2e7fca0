// Tables of the objectives, by type and by --objective name.
#include "diffusion/objective.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/json_config.h"
#include "diffusion/ddpm_objective.h"
#include "diffusion/flow_objective.h"
#include "diffusion/iddpm_objective.h"

namespace kiln {
namespace {

struct ObjectiveType {
  const char* type;
  std::unique_ptr<Objective> (*make)(const nlohmann::json&);
};
constexpr ObjectiveType kObjectiveTypes[] = {
    {"iddpm", make_iddpm_objective},
    {"ddpm", make_ddpm_objective},
    {"flow", make_flow_objective},
};

struct NamedObjective {
  const char* name;
  const char* config;
};
// The config of each --objective name. Image and latent models train on DiT's linear schedule of 1000
// timesteps.
constexpr NamedObjective kNamedObjectives[] = {
    {"iddpm", R"({"type": "iddpm", "beta_schedule": "linear", "learn_sigma": true,
                  "rescale_learned_sigmas": false, "num_train_timesteps": 1000})"},
    {"epsilon", R"({"type": "ddpm", "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02,
                    "num_train_timesteps": 1000, "prediction_type": "epsilon"})"},
    {"v_prediction", R"({"type": "ddpm", "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02,
                         "num_train_timesteps": 1000, "prediction_type": "v_prediction"})"},
    {"x_0", R"({"type": "ddpm", "beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02,
                "num_train_timesteps": 1000, "prediction_type": "sample"})"},
    {"flow", R"({"type": "flow", "mode": "continuous", "shift": 1.0, "num_train_timesteps": 1000,
                 "weighting": "none", "timestep_sampling": "logit_normal", "logit_mean": 0.0, "logit_std": 1.0})"},
};

}  // namespace

std::unique_ptr<Objective> make_objective(const nlohmann::json& config) {
  const std::string type = JsonConfig("objective", config).get<std::string>("type", "");
  std::vector<std::string> known;
  for (const ObjectiveType& entry : kObjectiveTypes) {
    if (type == entry.type) return entry.make(config);
    known.push_back(entry.type);
  }
  fail("objective", "expected the objective to be one of {}, got \"{}\"", fmt::join(known, ", "), type);
}

nlohmann::json objective_config(const std::string& name) {
  for (const NamedObjective& entry : kNamedObjectives)
    if (name == entry.name) return nlohmann::json::parse(entry.config);
  fail("objective", "expected --objective to be one of {}, got \"{}\"", fmt::join(objective_names(), ", "),
       name);
}

std::vector<std::string> objective_names() {
  std::vector<std::string> names;
  for (const NamedObjective& entry : kNamedObjectives) names.push_back(entry.name);
  return names;
}

}  // namespace kiln
