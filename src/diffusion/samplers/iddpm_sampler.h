// IDDPM's ancestral sampler and its DDIM variant on a respaced schedule (Nichol & Dhariwal 2021; Song et al.
// 2021).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "diffusion/sampler.h"

namespace kiln {

// {"steps": "250" | "3,5,8" | "ddim25" | "" (all) | a number, "beta_schedule", "num_train_timesteps",
//  "learn_sigma", "sigma_small", "clip_denoised"}.
std::unique_ptr<Sampler> make_iddpm_sampler(const nlohmann::json& config);
// Takes the same keys and "eta".
std::unique_ptr<Sampler> make_iddpm_ddim_sampler(const nlohmann::json& config);

// Returns the training timesteps that a respacing keeps, ascending. "10,15,20" keeps 10, 15 and 20 from three
// equal sections, "ddimN" takes the integer stride that gives exactly N, "" keeps all. Throws Error if that
// cannot be done.
std::vector<int64_t> respaced_timesteps(int64_t num_train_timesteps, const std::string& respacing);

}  // namespace kiln
