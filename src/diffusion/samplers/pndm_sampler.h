// PNDM (Liu et al. 2022, "Pseudo Numerical Methods for Diffusion Models on Manifolds"), as diffusers'
// PNDMScheduler has it: Runge-Kutta steps of four model calls each, then linear multistep ones; or, with
// skip_prk_steps, multistep ones alone, of which the first takes two calls (PLMS, Stable Diffusion's).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// config: steps, scheduler (scheduler_config.json), consecutive (false: multistep steps go T / steps further
// down, as diffusers has them; true: to the next timestep of the list, and at last to x_0). timesteps() has
// an entry per model call. Throws Error.
std::unique_ptr<Sampler> make_pndm_sampler(const nlohmann::json& config);

}  // namespace kiln
