// The tables of timesteps of flow matching.
#pragma once
#include <cstdint>
#include <vector>

namespace kiln {

// A noise level per timestep index, and the timestep that the model is given there.
struct FlowTable {
  std::vector<double> sigmas, model_t;
};
// Returns Sana's native table: ascending from 0, model timesteps truncated to integers.
FlowTable sana_flow_table(int64_t num_train_timesteps, double shift);
// Returns the table of diffusers' FlowMatchEulerDiscreteScheduler at construction: descending from 1, f32.
FlowTable diffusers_flow_table(int64_t num_train_timesteps, double shift);

}  // namespace kiln
