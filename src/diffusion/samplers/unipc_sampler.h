// UniPC (Zhao et al. 2023, "A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models")
// in its data prediction form, like diffusers' UniPCMultistepScheduler.
#pragma once
#include <memory>
#include <nlohmann/json.hpp>

#include "diffusion/sampler.h"

namespace kiln {

// config: steps, scheduler (scheduler_config.json). Throws Error.
std::unique_ptr<Sampler> make_unipc_sampler(const nlohmann::json& config);

}  // namespace kiln
