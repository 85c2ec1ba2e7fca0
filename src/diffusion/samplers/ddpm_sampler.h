// Ancestral sampling (Ho et al. 2020) by a diffusers DDPMScheduler config.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "scheduler": {...}}.
std::unique_ptr<Sampler> make_ddpm_sampler(const nlohmann::json& config);

}  // namespace kiln
