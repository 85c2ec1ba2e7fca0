#include "convert/model_card.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "diffusion/sampler.h"
#include "diffusion/samplers/spacing.h"

namespace kiln {
namespace {

using nlohmann::json;

// Returns the noise schedule as diffusers' schedulers have it. IDDPM's betas are numbers here.
json noise_schedule(const json& objective) {
  json scheduler = sampler_config("dpmpp_2m", 2, objective).at("scheduler");
  scheduler.erase("clip_sample");  // the schedulers that know it clip by default
  return scheduler;
}

json of_class(const char* name, json scheduler) {
  scheduler["_class_name"] = name;
  return scheduler;
}

std::string steps_argument(int64_t steps) { return fmt::format("num_inference_steps={}", steps); }

std::string timesteps_argument(const std::vector<double>& timesteps) {
  return fmt::format("timesteps=[{}]", fmt::join(timesteps, ", "));
}

// A solver of first order takes the steps of DDIM, and of Euler on flows.
json first_order_solver(json scheduler) {
  scheduler["solver_order"] = 1;
  return of_class("DPMSolverMultistepScheduler", std::move(scheduler));
}

// diffusers' own DDIM goes from t to t - 1000 / steps, wherever the next timestep is.
DiffusersSchedule ddim(const json& sampler, int64_t, const json& objective) {
  return {.config = first_order_solver(noise_schedule(objective)),
          .arguments = timesteps_argument(make_sampler(sampler)->timesteps())};
}

DiffusersSchedule ddpm(const json& sampler, int64_t steps, const json& objective) {
  json scheduler = noise_schedule(objective);
  scheduler["timestep_spacing"] = "linspace";
  scheduler["clip_sample"] = false;
  const bool is_iddpm = sampler.at("type") == "iddpm",
             learns = is_iddpm && sampler.value("learn_sigma", true);
  scheduler["variance_type"] =
      learns || (is_iddpm && !sampler.value("sigma_small", false)) ? "fixed_large" : "fixed_small";
  const std::vector<double> timesteps = make_sampler(sampler)->timesteps();
  std::vector<double> even = linspace(0, scheduler.at("num_train_timesteps").get<double>() - 1, steps);
  std::ranges::transform(even, even.begin(), [](double t) { return std::nearbyint(t); });
  std::ranges::reverse(even);
  DiffusersSchedule schedule = {
      .config = of_class("DDPMScheduler", std::move(scheduler)),
      .arguments = timesteps == even ? steps_argument(steps) : timesteps_argument(timesteps),
      .is_stochastic = true};
  if (!learns) return schedule;
  schedule.outside_pipelines = schedule.config;
  schedule.outside_pipelines["variance_type"] = "learned_range";
  schedule.why_outside = "it drops the learned variance";
  return schedule;
}

// For a sampler whose config has a scheduler's settings that the class reads as they are.
template <const char* const& kClass>  // name of the class
DiffusersSchedule as_configured(const json& sampler, int64_t steps, const json&) {
  json scheduler = sampler.at("scheduler");
  scheduler.erase("clip_sample");
  return {.config = of_class(kClass, std::move(scheduler)),
          .arguments = steps_argument(steps),
          .is_stochastic = make_sampler(sampler)->stochastic()};
}
constexpr const char* kSolver = "DPMSolverMultistepScheduler";
constexpr const char* kUniPc = "UniPCMultistepScheduler";
constexpr const char* kEuler = "EulerDiscreteScheduler";
constexpr const char* kEulerAncestral = "EulerAncestralDiscreteScheduler";
constexpr const char* kPndm = "PNDMScheduler";

DiffusersSchedule pndm(const json& sampler, int64_t steps, const json& objective) {
  DiffusersSchedule schedule = as_configured<kPndm>(sampler, steps, objective);
  if (schedule.config.at("num_train_timesteps").get<int64_t>() % steps != 0)
    schedule.limit = fmt::format("PNDMScheduler steps unevenly where {} does not divide {} timesteps", steps,
                                 schedule.config.at("num_train_timesteps").get<int64_t>());
  return schedule;
}

DiffusersSchedule pixart_dpms(const json&, int64_t steps, const json& objective) {
  DiffusersSchedule schedule =
      as_configured<kSolver>(sampler_config("dpmpp_2m", steps, objective), steps, objective);
  schedule.limit = "diffusers has no pixart_dpms: dpmpp_2m stands for it, and draws another picture";
  return schedule;
}

DiffusersSchedule flow_euler(const json& sampler, int64_t steps, const json&) {
  return {.config = of_class("FlowMatchEulerDiscreteScheduler", sampler.at("scheduler")),
          .arguments = fmt::format("sigmas=[1 - i / {0} for i in range({0})]", steps)};
}

struct Row {
  const char* sampler;
  DiffusersSchedule (*schedule)(const json& sampler, int64_t steps, const json& objective);
};
constexpr Row kRows[] = {
    {"ddpm", ddpm},
    {"ddim", ddim},
    {"dpmpp_2m", as_configured<kSolver>},
    {"unipc", as_configured<kUniPc>},
    {"euler", as_configured<kEuler>},
    {"euler_ancestral", as_configured<kEulerAncestral>},
    {"pndm", pndm},
    {"pixart_dpms", pixart_dpms},
    {"flow_euler", flow_euler},
};

}  // namespace

DiffusersSchedule diffusers_schedule(const std::string& sampler, int64_t num_sampling_steps,
                                     const json& objective, bool takes_flow_match) {
  const json config = sampler_config(sampler, num_sampling_steps, objective);
  const auto row = std::ranges::find(kRows, sampler, &Row::sampler);
  if (row == std::end(kRows)) fail("convert", "no diffusers scheduler is known for --sampler {}", sampler);
  DiffusersSchedule schedule = row->schedule(config, num_sampling_steps, objective);
  if (takes_flow_match || schedule.config.at("_class_name") != "FlowMatchEulerDiscreteScheduler")
    return schedule;
  // Most pipelines scale the model's input by the scheduler, which that class does not do. Its steps are
  // those of a solver of first order, whose timesteps are whole numbers.
  schedule.outside_pipelines = std::move(schedule.config);
  schedule.why_outside = "its loop does not run FlowMatchEulerDiscreteScheduler";
  schedule.config = first_order_solver(noise_schedule(objective));
  return schedule;
}

}  // namespace kiln
