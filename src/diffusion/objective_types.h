// The tables of the objectives, by type and by --objective name. A new one is a source file, its declaration
// and a row here.
#pragma once
#include "diffusion/objective.h"

namespace kiln {

// DiT's: epsilon prediction with, optionally, a learned variance (Nichol & Dhariwal 2021).
std::unique_ptr<Objective> make_iddpm_objective(const nlohmann::json& config);
// On a diffusers noise schedule: predicts noise, v or x_0, optionally with min-SNR weights.
std::unique_ptr<Objective> make_ddpm_objective(const nlohmann::json& config);
// Flow matching (rectified flow): x_t = (1 - sigma) x_0 + sigma noise, velocity = noise - x_0 (Liu et al.
// 2022, Lipman et al. 2022, Esser et al. 2024).
std::unique_ptr<Objective> make_flow_objective(const nlohmann::json& config);

// The type of a config says how a model is noised and drawn. Its loss says how the prediction is compared
// with the target; "" is the mean squared error.
struct ObjectiveType {
  const char *type, *loss;
  std::unique_ptr<Objective> (*make)(const nlohmann::json& config);
};
inline constexpr ObjectiveType kObjectiveTypes[] = {
    {"iddpm", "", make_iddpm_objective},
    {"ddpm", "", make_ddpm_objective},
    {"flow", "", make_flow_objective},
};

struct NamedObjective {
  const char* name;
  const char* config;
};
// The config of each --objective name. Image and latent models train on DiT's linear schedule of 1000
// timesteps.
inline constexpr NamedObjective kNamedObjectives[] = {
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

}  // namespace kiln
