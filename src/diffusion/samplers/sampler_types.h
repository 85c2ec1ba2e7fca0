// The table of the samplers by the "type" of a config. A new one is a source file, its declaration and a row
// here. Configs hold "steps" and, but for IDDPM's, "scheduler": a diffusers scheduler_config.json.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"
#include "diffusion/sampler.h"

namespace kiln {

// IDDPM's ancestral sampler and its DDIM variant on a respaced schedule (Nichol & Dhariwal 2021; Song et al.
// 2021): {"steps": "250" | "3,5,8" | "ddim25" | "" (all) | a number, "beta_schedule", "num_train_timesteps",
// "learn_sigma", "sigma_small", "clip_denoised"}, and "eta" of the variant.
std::unique_ptr<Sampler> make_iddpm_sampler(const nlohmann::json& config);
std::unique_ptr<Sampler> make_iddpm_ddim_sampler(const nlohmann::json& config);
// Returns the training timesteps that a respacing keeps, ascending. "10,15,20" keeps 10, 15 and 20 from three
// equal sections, "ddimN" takes the integer stride that gives exactly N, "" keeps all. Throws Error if that
// cannot be done.
std::vector<int64_t> respaced_timesteps(int64_t num_train_timesteps, const std::string& respacing);

// DDIM (Song et al. 2021): "eta", "consecutive". diffusers always steps from t to t - T / steps. With
// "consecutive": true it steps to the next timestep itself. The two differ if steps does not divide T.
std::unique_ptr<Sampler> make_ddim_sampler(const nlohmann::json& config);

// Ancestral sampling (Ho et al. 2020).
std::unique_ptr<Sampler> make_ddpm_sampler(const nlohmann::json& config);

// Takes Euler steps along a flow-matching velocity: "sigmas" are levels before the shift that replace the
// scheduler's own. The scheduler's own start from the shifted table, so the shift acts twice at its low end.
std::unique_ptr<Sampler> make_flow_euler_sampler(const nlohmann::json& config);

// DPM-Solver++ multistep (Lu et al. 2022): algorithm_type dpmsolver++ or sde-dpmsolver++, solver_order 1 to
// 3.
std::unique_ptr<Sampler> make_dpmpp_sampler(const nlohmann::json& config);

// Euler's method on dx / dsigma and its ancestral variant (Karras et al. 2022, algorithm 1 without churn).
// Samples are not scaled down: x = x_0 + sigma noise.
std::unique_ptr<Sampler> make_euler_sampler(const nlohmann::json& config);
std::unique_ptr<Sampler> make_euler_ancestral_sampler(const nlohmann::json& config);

// UniPC (Zhao et al. 2023, "A Unified Predictor-Corrector Framework for Fast Sampling of Diffusion Models")
// in its data prediction form.
std::unique_ptr<Sampler> make_unipc_sampler(const nlohmann::json& config);

// PNDM (Liu et al. 2022, "Pseudo Numerical Methods for Diffusion Models on Manifolds"): Runge-Kutta steps of
// four model calls each, then linear multistep ones. With skip_prk_steps there are only multistep ones, and
// the first takes two calls (PLMS, used by Stable Diffusion). "consecutive": false: multistep steps go T /
// steps down, as in diffusers; true: to the next timestep of the list, at last to x_0. timesteps() has an
// entry per model call.
std::unique_ptr<Sampler> make_pndm_sampler(const nlohmann::json& config);

// DPM-Solver++ (Lu et al. 2022) as PixArt's own scripts run it: second-order multistep on evenly spaced times
// of a continuous schedule, interpolated between the training timesteps. Instead of "scheduler" it takes
// "num_train_timesteps", "beta_schedule" and "prediction_type" too.
std::unique_ptr<Sampler> make_pixart_dpms_sampler(const nlohmann::json& config);

struct SamplerType {
  const char* type;
  std::unique_ptr<Sampler> (*make)(const nlohmann::json& config);
};
inline constexpr SamplerType kSamplerTypes[] = {
    {"iddpm", make_iddpm_sampler},
    {"iddpm_ddim", make_iddpm_ddim_sampler},
    {"ddim", make_ddim_sampler},
    {"ddpm", make_ddpm_sampler},
    {"flow_euler", make_flow_euler_sampler},
    {"dpmpp", make_dpmpp_sampler},
    {"euler", make_euler_sampler},
    {"euler_ancestral", make_euler_ancestral_sampler},
    {"unipc", make_unipc_sampler},
    {"pndm", make_pndm_sampler},
    {"pixart_dpms", make_pixart_dpms_sampler},
};

}  // namespace kiln
