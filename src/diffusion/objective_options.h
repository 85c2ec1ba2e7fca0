// What a run minimises.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "core/choices.h"

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

struct ObjectiveOptions {
  std::string name = "iddpm";  // one of objective_names()
  // flow; none: the objective's own.
  std::optional<TimestepSampling> timestep_sampling{};
  std::optional<LossWeighting> weighting{};
  double logit_mean = 0, logit_std = 1;  // of the logit-normal
  double flow_shift = 1;                 // of timesteps, towards noise
  double snr_gamma = 0;                  // epsilon, v_prediction, x_0: min-SNR weighting; 0: off
};

// The config for make_objective(). Throws Error naming the option: an unknown name, a setting that would have
// no effect.
nlohmann::json objective_config_of(const ObjectiveOptions& options);

}  // namespace kiln
