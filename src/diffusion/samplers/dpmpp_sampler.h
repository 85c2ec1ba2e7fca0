// DPM-Solver++ multistep (Lu et al. 2022) by a diffusers DPMSolverMultistepScheduler config.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "scheduler": {...}}: algorithm_type dpmsolver++ or sde-dpmsolver++, solver_order 1 to 3.
std::unique_ptr<Sampler> make_dpmpp_sampler(const nlohmann::json& config);

}  // namespace kiln
