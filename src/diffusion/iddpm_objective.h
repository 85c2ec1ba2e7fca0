// DiT's objective: epsilon prediction with, optionally, a learned variance (Nichol & Dhariwal 2021).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/objective.h"

namespace kiln {

std::unique_ptr<Objective> make_iddpm_objective(const nlohmann::json& config);

}  // namespace kiln
