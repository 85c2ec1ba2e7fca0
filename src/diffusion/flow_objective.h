// Flow matching (rectified flow): x_t = (1 - sigma) x_0 + sigma noise, velocity = noise - x_0 (Liu et al.
// 2022, Lipman et al. 2022, Esser et al. 2024).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "diffusion/objective.h"

namespace kiln {

std::unique_ptr<Objective> make_flow_objective(const nlohmann::json& config);

// A noise level per timestep index, and the timestep that the model is given there.
struct FlowTable {
  std::vector<double> sigmas, model_t;
};
// Returns Sana's native table: ascending from 0, model timesteps truncated to integers.
FlowTable sana_flow_table(int64_t num_train_timesteps, double shift);
// Returns the table of diffusers' FlowMatchEulerDiscreteScheduler at construction: descending from 1, f32.
FlowTable diffusers_flow_table(int64_t num_train_timesteps, double shift);

}  // namespace kiln
