// Trains on a diffusers noise schedule to predict noise, v or x_0, optionally with min-SNR weights.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/objective.h"

namespace kiln {

std::unique_ptr<Objective> make_ddpm_objective(const nlohmann::json& config);

}  // namespace kiln
