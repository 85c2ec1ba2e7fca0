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
// "learn_sigma",
//  "sigma_small", "clip_denoised"}.
std::unique_ptr<Sampler> make_iddpm_sampler(const nlohmann::json& config);
// The same keys and "eta".
std::unique_ptr<Sampler> make_iddpm_ddim_sampler(const nlohmann::json& config);

// The training timesteps, ascending, that a respacing keeps. "10,15,20": that many from each of as many equal
// sections; "ddimN": the integer stride that gives exactly N; "": all. Throws Error when it cannot be done.
std::vector<int64_t> respaced_timesteps(int64_t num_train_timesteps, const std::string& respacing);

}  // namespace kiln
