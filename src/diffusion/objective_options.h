// Options of the objective.
#pragma once
#include <optional>
#include <string>

#include "core/choices.h"
#include "core/json.h"

namespace kiln {

// How flow draws its timesteps.
enum class TimestepSampling { kUniform, kLogitNormal };
template <>
struct Choices<TimestepSampling> {
  static constexpr std::pair<TimestepSampling, const char*> kAll[] = {
      {TimestepSampling::kUniform, "uniform"}, {TimestepSampling::kLogitNormal, "logit_normal"}};
};

// How flow weighs its timesteps.
enum class LossWeighting { kNone, kCosmap };
template <>
struct Choices<LossWeighting> {
  static constexpr std::pair<LossWeighting, const char*> kAll[] = {{LossWeighting::kNone, "none"},
                                                                   {LossWeighting::kCosmap, "cosmap"}};
};

// Where flow's timesteps come from: any level of noise, or a table of 1,000 of them, that of Sana's
// repository (timesteps cut to integers) or that of diffusers' FlowMatchEulerDiscreteScheduler.
enum class FlowTimes { kContinuous, kSana, kDiffusers };
template <>
struct Choices<FlowTimes> {
  static constexpr std::pair<FlowTimes, const char*> kAll[] = {{FlowTimes::kContinuous, "continuous"},
                                                               {FlowTimes::kSana, "sana"},
                                                               {FlowTimes::kDiffusers, "diffusers"}};
};

// How fast epsilon, v_prediction and x_0 add noise: linearly in beta (DiT), linearly in its square root
// (scaled_linear, Stable Diffusion), or by a squared cosine.
enum class BetaSchedule { kLinear, kScaledLinear, kSquaredCosine };
template <>
struct Choices<BetaSchedule> {
  static constexpr std::pair<BetaSchedule, const char*> kAll[] = {
      {BetaSchedule::kLinear, "linear"},
      {BetaSchedule::kScaledLinear, "scaled_linear"},
      {BetaSchedule::kSquaredCosine, "squaredcos_cap_v2"}};
};

struct ObjectiveOptions {
  std::string name = "iddpm";  // one of objective_names()
  // For flow. Unset: the objective's own.
  std::optional<TimestepSampling> timestep_sampling{};
  std::optional<LossWeighting> weighting{};
  double logit_mean = 0, logit_std = 1;  // parameters of logit_normal
  double flow_shift = 1;                 // shifts timesteps towards noise
  FlowTimes flow_times = FlowTimes::kContinuous;
  double contrastive_weight = 0;  // contrastive flow matching; 0: off
  // For epsilon, v_prediction and x_0.
  BetaSchedule beta_schedule = BetaSchedule::kLinear;
  double beta_start = 0.0001, beta_end = 0.02;
  bool zero_terminal_snr = false;  // the last timestep is pure noise (Lin et al. 2024); not for epsilon
  double snr_gamma = 0;            // min-SNR weighting; 0: off
  // For every objective. Weight of the alignment of a block's tokens with the clean picture; 0: off.
  double align_weight = 0;
  // For every objective, as diffusers' training scripts define them: noise that all pixels of a channel
  // share, and extra noise in x_t that is not predicted.
  double offset_noise = 0, input_perturbation = 0;
};

// Returns the config for make_objective(). Throws Error naming the option: an unknown name, a setting without
// effect.
nlohmann::json objective_config_of(const ObjectiveOptions& options);

}  // namespace kiln
