// Noise, v or x_0 prediction on a diffusers noise schedule, optionally with min-SNR weights.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/objective.h"

namespace kiln {

std::unique_ptr<Objective> make_ddpm_objective(const nlohmann::json& config);

}  // namespace kiln
