// Euler's method on dx / dsigma and its ancestral variant (Karras et al. 2022, algorithm 1 without churn),
// like diffusers' EulerDiscreteScheduler and EulerAncestralDiscreteScheduler. Samples are not scaled down: x
// = x_0 + sigma noise.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// config: steps, scheduler (scheduler_config.json). Throws Error.
std::unique_ptr<Sampler> make_euler_sampler(const nlohmann::json& config);
std::unique_ptr<Sampler> make_euler_ancestral_sampler(const nlohmann::json& config);

}  // namespace kiln
