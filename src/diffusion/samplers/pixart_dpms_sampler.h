// DPM-Solver++ (Lu et al. 2022) as PixArt's own scripts run it: second-order multistep on evenly spaced times
// of a continuous schedule, interpolated between the training timesteps.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "num_train_timesteps", "beta_schedule", "prediction_type"}, or "scheduler": {...} with the betas
// of a diffusers scheduler.
std::unique_ptr<Sampler> make_pixart_dpms_sampler(const nlohmann::json& config);

}  // namespace kiln
