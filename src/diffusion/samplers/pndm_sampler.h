// PNDM (Liu et al. 2022, "Pseudo Numerical Methods for Diffusion Models on Manifolds"), like diffusers'
// PNDMScheduler: Runge-Kutta steps of four model calls each, then linear multistep ones. With skip_prk_steps
// there are only multistep ones, and the first takes two calls (PLMS, used by Stable Diffusion).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// config: steps, scheduler (scheduler_config.json), consecutive (false: multistep steps go T / steps down, as
// in diffusers; true: to the next timestep of the list, at last to x_0). timesteps() has an entry per model
// call. Throws Error.
std::unique_ptr<Sampler> make_pndm_sampler(const nlohmann::json& config);

}  // namespace kiln
