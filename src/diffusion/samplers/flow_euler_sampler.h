// Takes Euler steps along a flow-matching velocity, by a diffusers FlowMatchEulerDiscreteScheduler config.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "scheduler": {...}, "sigmas"}. "sigmas": levels before the shift that replace the scheduler's
// own. The scheduler's own start from the shifted table, so the shift acts twice at its low end.
std::unique_ptr<Sampler> make_flow_euler_sampler(const nlohmann::json& config);

}  // namespace kiln
