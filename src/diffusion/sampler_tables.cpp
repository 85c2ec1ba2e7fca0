// The samplers by --sampler name.
#include "diffusion/sampler.h"

#include <fmt/ranges.h>

#include <cmath>

#include "core/error.h"
#include "core/json_config.h"
#include "diffusion/objective.h"
#include "diffusion/samplers/sampler_types.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/scheduler_config.h"

namespace kiln {
namespace {

using nlohmann::json;

json iddpm_config(const char* type, int64_t steps, const json& objective) {
  json config = objective;
  config["type"] = type;
  config["steps"] = std::to_string(steps);
  config["clip_denoised"] = false;
  return config;
}

bool is_type(const json& objective, const char* type) {
  return JsonConfig("sampler", objective).get<std::string>("type", "") == type;
}

json ddpm_config(int64_t steps, const json& objective) {
  if (is_type(objective, "iddpm")) return iddpm_config("iddpm", steps, objective);
  json scheduler = scheduler_of(objective);
  scheduler["timestep_spacing"] = "linspace";  // from pure noise to t = 0, like IDDPM's respacing
  return {{"type", "ddpm"}, {"steps", steps}, {"scheduler", scheduler}};
}

json ddim_config(int64_t steps, const json& objective) {
  if (is_type(objective, "iddpm")) return iddpm_config("iddpm_ddim", steps, objective);
  json scheduler = scheduler_of(objective);
  scheduler["timestep_spacing"] = "linspace";
  return {{"type", "ddim"}, {"steps", steps}, {"eta", 0.0}, {"consecutive", true}, {"scheduler", scheduler}};
}

// Configures a solver that can also sample flow models.
json solver_config(const char* type, int64_t steps, const json& objective) {
  json scheduler;
  if (is_type(objective, "flow")) {
    const JsonConfig config("sampler", objective);
    scheduler = {{"prediction_type", "flow_prediction"},
                 {"use_flow_sigmas", true},
                 {"flow_shift", config.get("shift", 1.0)},
                 {"num_train_timesteps", config.positive("num_train_timesteps", 1000)}};
  } else {
    scheduler = scheduler_of(objective);
  }
  return {{"type", type}, {"steps", steps}, {"scheduler", scheduler}};
}

json dpmpp_config(int64_t steps, const json& objective) { return solver_config("dpmpp", steps, objective); }
json unipc_config(int64_t steps, const json& objective) { return solver_config("unipc", steps, objective); }

// Spaces steps from pure noise: the last training timestep comes first.
json trailing_scheduler(const json& objective) {
  json scheduler = scheduler_of(objective);
  scheduler["timestep_spacing"] = "trailing";
  return scheduler;
}

json euler_config(int64_t steps, const json& objective) {
  return {{"type", "euler"}, {"steps", steps}, {"scheduler", trailing_scheduler(objective)}};
}

json euler_ancestral_config(int64_t steps, const json& objective) {
  return {{"type", "euler_ancestral"}, {"steps", steps}, {"scheduler", trailing_scheduler(objective)}};
}

json pndm_config(int64_t steps, const json& objective) {
  json scheduler = trailing_scheduler(objective);
  scheduler["skip_prk_steps"] = true;  // as Stable Diffusion is sampled
  scheduler["set_alpha_to_one"] = true;
  return {{"type", "pndm"}, {"steps", steps}, {"consecutive", true}, {"scheduler", scheduler}};
}

json pixart_dpms_config(int64_t steps, const json& objective) {
  const json scheduler = scheduler_of(objective);
  json config = {{"type", "pixart_dpms"},
                 {"steps", steps},
                 {"num_train_timesteps", scheduler["num_train_timesteps"]},
                 {"prediction_type", scheduler["prediction_type"]}};
  if (is_type(objective, "iddpm"))
    config["beta_schedule"] = scheduler["beta_schedule"];
  else
    config["scheduler"] = scheduler;
  return config;
}

json flow_euler_config(int64_t steps, const json& objective) {
  const JsonConfig config("sampler", objective);
  json scheduler = {{"shift", config.get("shift", 1.0)},
                    {"num_train_timesteps", config.positive("num_train_timesteps", 1000)}};
  // Even steps from 1 to 0. The scheduler's own levels end at the training table's lowest, which wastes the
  // last step.
  const std::vector<double> sigmas = linspace(1, 1 / static_cast<double>(steps), steps);
  return {{"type", "flow_euler"}, {"steps", steps}, {"sigmas", sigmas}, {"scheduler", scheduler}};
}

struct NamedSampler {
  const char* name;
  bool on_schedule, on_flow;  // the kinds of models that it samples
  json (*config)(int64_t steps, const json& objective);
  int64_t usual_steps = 50;

  bool samples(const json& objective) const { return is_type(objective, "flow") ? on_flow : on_schedule; }
};
constexpr NamedSampler kNamedSamplers[] = {
    {"ddpm", true, false, ddpm_config, 250},
    {"ddim", true, false, ddim_config},
    {"dpmpp_2m", true, true, dpmpp_config, 20},
    {"unipc", true, true, unipc_config},
    {"euler", true, false, euler_config},
    {"euler_ancestral", true, false, euler_ancestral_config},
    {"pndm", true, false, pndm_config},
    {"pixart_dpms", true, false, pixart_dpms_config},
    {"flow_euler", false, true, flow_euler_config},
};

const NamedSampler* find_sampler(const std::string& name) {
  for (const NamedSampler& entry : kNamedSamplers)
    if (name == entry.name) return &entry;
  return nullptr;
}

}  // namespace

std::unique_ptr<Sampler> make_sampler(const json& config) {
  const std::string type = JsonConfig("sampler", config).get<std::string>("type", "");
  std::vector<std::string> known;
  for (const SamplerType& entry : kSamplerTypes) {
    known.push_back(entry.type);
    if (type != entry.type) continue;
    std::unique_ptr<Sampler> sampler = entry.make(config);
    const int64_t first = JsonConfig("sampler", config).get<int64_t>("first_step", 0);
    if (first < 0 || first >= sampler->step_count())
      fail("sampler", "expected first_step to be 0 to {}, got {}", sampler->step_count() - 1, first);
    if (first > 0) sampler->skip(first);
    return sampler;
  }
  fail("sampler", "expected the sampler to be one of {}, got \"{}\"", fmt::join(known, ", "), type);
}

json sampler_config(const std::string& name, int64_t num_sampling_steps, const json& objective) {
  make_objective(objective);                 // validates the config read below
  constexpr int64_t kMostSteps = 1'000'000;  // make_sampler() checks against the training timesteps
  if (num_sampling_steps < 1 || num_sampling_steps > kMostSteps)
    fail("sampler", "expected --num-sampling-steps to be 1 to {}, got {}", kMostSteps, num_sampling_steps);
  const NamedSampler* const sampler = find_sampler(name);
  if (sampler == nullptr)
    fail("sampler", "expected --sampler to be one of {}, got \"{}\"", fmt::join(sampler_names(), ", "), name);
  if (sampler->samples(objective)) return sampler->config(num_sampling_steps, objective);
  std::vector<std::string> fitting;
  for (const NamedSampler& entry : kNamedSamplers)
    if (entry.samples(objective)) fitting.push_back(entry.name);
  fail("sampler", "{} cannot sample a model trained with the {} objective: use {}", name,
       objective.at("type").get<std::string>(), fmt::join(fitting, " or "));
}

bool samples(const std::string& sampler, const json& objective) {
  const NamedSampler* const found = find_sampler(sampler);
  return found != nullptr && found->samples(objective);
}

std::string default_sampler(const json& objective) {
  return is_type(objective, "flow") ? "flow_euler" : "ddim";
}

int64_t usual_sampling_steps(const std::string& sampler) {
  const NamedSampler* const found = find_sampler(sampler);
  return found != nullptr ? found->usual_steps : NamedSampler{}.usual_steps;
}

std::vector<std::string> sampler_names() {
  std::vector<std::string> names;
  for (const NamedSampler& entry : kNamedSamplers) names.push_back(entry.name);
  return names;
}

int64_t first_step_of(double strength, int64_t num_sampling_steps, const json& objective) {
  if (!(strength > 0 && strength <= 1))
    fail("sampler", "expected --strength to be above 0 and at most 1, got {}", strength);
  // If steps x strength is not a whole number, the pipelines of flow models take one step more.
  const double steps = static_cast<double>(num_sampling_steps), made = steps * strength;
  const auto first =
      static_cast<int64_t>(is_type(objective, "flow") ? steps - made : steps - std::floor(made));
  if (first >= num_sampling_steps)
    fail("sampler", "--strength {} leaves none of {} steps: raise it or --num-sampling-steps", strength,
         num_sampling_steps);
  return first;
}

at::Tensor run_sampler(Sampler& sampler, const at::Tensor& noise, const DenoiseFn& denoise,
                       const StepNoiseFn& step_noise,
                       const std::function<void(int64_t, const at::Tensor&)>& on_step) {
  return run_sampler_from(sampler, sampler.start_scale() == 1 ? noise : noise * sampler.start_scale(),
                          denoise, step_noise, on_step);
}

at::Tensor run_sampler_from(Sampler& sampler, at::Tensor x, const DenoiseFn& denoise,
                            const StepNoiseFn& step_noise,
                            const std::function<void(int64_t, const at::Tensor&)>& on_step) {
  const std::vector<double>& timesteps = sampler.timesteps();
  for (int64_t i = 0; i < static_cast<int64_t>(timesteps.size()); ++i) {
    x = sampler.step(i, x, denoise(sampler.model_input(i, x), timesteps[i]), step_noise);
    if (on_step) on_step(i, x);
  }
  return x;
}

}  // namespace kiln
