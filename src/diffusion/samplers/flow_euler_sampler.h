// Euler steps along a flow-matching velocity, by a diffusers FlowMatchEulerDiscreteScheduler config.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps", "scheduler": {...}, "sigmas"}. "sigmas": the levels before the shift, in place of the scheduler's
// own (which start from the shifted table, so that the shift acts twice at its low end).
std::unique_ptr<Sampler> make_flow_euler_sampler(const nlohmann::json& config);

}  // namespace kiln
