#include "diffusion/objective_options.h"

#include "core/error.h"
#include "diffusion/objective.h"

namespace kiln {

nlohmann::json objective_config_of(const ObjectiveOptions& options) {
  nlohmann::json config = objective_config(options.name);
  const ObjectiveOptions defaults;
  const bool flow = config.at("type") == "flow", ddpm = config.at("type") == "ddpm";
  const auto set = [&](bool applies, const char* option, const char* key, const nlohmann::json& value) {
    if (!applies) fail("train", "--{} has no effect with --objective {}: leave it out", option, options.name);
    config[key] = value;
  };
  if (options.timestep_sampling)
    set(flow, "timestep-sampling", "timestep_sampling", choice_name(*options.timestep_sampling));
  if (options.weighting) set(flow, "weighting", "weighting", choice_name(*options.weighting));
  const auto set_number = [&](bool applies, const char* option, const char* key, double value,
                              double default_value) {
    if (value != default_value) set(applies, option, key, value);
  };
  set_number(flow, "logit-mean", "logit_mean", options.logit_mean, defaults.logit_mean);
  set_number(flow, "logit-std", "logit_std", options.logit_std, defaults.logit_std);
  set_number(flow, "flow-shift", "shift", options.flow_shift, defaults.flow_shift);
  if (options.flow_times != defaults.flow_times)
    set(flow, "flow-times", "mode", choice_name(options.flow_times));
  set_number(flow, "contrastive-weight", "contrastive_lambda", options.contrastive_weight,
             defaults.contrastive_weight);
  set_number(ddpm, "snr-gamma", "snr_gamma", options.snr_gamma, defaults.snr_gamma);
  if (options.beta_schedule != defaults.beta_schedule)
    set(ddpm, "beta-schedule", "beta_schedule", choice_name(options.beta_schedule));
  set_number(ddpm, "beta-start", "beta_start", options.beta_start, defaults.beta_start);
  set_number(ddpm, "beta-end", "beta_end", options.beta_end, defaults.beta_end);
  if (options.zero_terminal_snr) set(ddpm, "zero-terminal-snr", "rescale_betas_zero_snr", true);
  if (options.zero_terminal_snr && config.at("prediction_type") == "epsilon")
    fail(
        "train",
        "--zero-terminal-snr leaves nothing to predict epsilon from at the last timestep: choose --objective "
        "v_prediction");
  make_objective(config);
  return config;
}

}  // namespace kiln
