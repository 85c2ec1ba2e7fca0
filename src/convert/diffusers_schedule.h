// How diffusers takes the steps of Kiln's samplers.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace kiln {

struct DiffusersSchedule {
  nlohmann::json config;  // scheduler_config.json, which the loops of pipelines run
  // Of the scheduler that takes the sampler's steps where the loops of pipelines cannot run it, and why they
  // cannot; else null.
  nlohmann::json outside_pipelines{};
  std::string why_outside{};
  std::string arguments;  // of set_timesteps() and of a pipeline's call, in Python: "num_inference_steps=20"
  std::string limit{};    // how diffusers' steps differ from the sampler's; "": they are the same
  bool is_stochastic = false;  // every step adds noise, which diffusers draws itself
};

// Returns the schedule of a sampler (one of sampler_names()) for a model of this objective (make_objective's
// config). `takes_flow_match`: the pipeline's loop runs FlowMatchEulerDiscreteScheduler. Throws Error for a
// sampler that does not fit the objective.
DiffusersSchedule diffusers_schedule(const std::string& sampler, int64_t num_sampling_steps,
                                     const nlohmann::json& objective, bool takes_flow_match);

}  // namespace kiln
