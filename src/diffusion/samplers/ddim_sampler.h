// DDIM (Song et al. 2021) by a diffusers DDIMScheduler config.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "eta", "scheduler": {...}, "consecutive"}. diffusers steps from t to t - T / steps, whatever the
// next timestep is; "consecutive": true steps to the next timestep itself, which differs when steps does not
// divide T.
std::unique_ptr<Sampler> make_ddim_sampler(const nlohmann::json& config);

}  // namespace kiln
