// DDIM (Song et al. 2021) by a diffusers DDIMScheduler config.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "eta", "scheduler": {...}, "consecutive"}. diffusers always steps from t to t - T / steps. With
// "consecutive": true it steps to the next timestep itself. The two differ if steps does not divide T.
std::unique_ptr<Sampler> make_ddim_sampler(const nlohmann::json& config);

}  // namespace kiln
