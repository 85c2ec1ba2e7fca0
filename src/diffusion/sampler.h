// Samplers. They never see a model, only a DenoiseFn.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/json.h"

namespace kiln {

// (x (B, C, H, W) f32, model timestep) -> raw model output (B, C or 2C, H, W) f32, guidance already applied.
using DenoiseFn = std::function<at::Tensor(const at::Tensor& x, double model_t)>;
// Returns the normal draw of a step, (B, C, H, W) f32. Called only if the sampler adds noise (not at t = 0).
using StepNoiseFn = std::function<at::Tensor(int64_t step)>;

class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual const std::vector<double>& timesteps() const = 0;  // as given to the model, in order of use
  // Takes one step: x at timesteps()[i] -> x at the next. Steps go in order from 0, since multistep samplers
  // keep history.
  virtual at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                          const StepNoiseFn& noise) = 0;
  virtual bool stochastic() const = 0;
  // Returns the model's input at timesteps()[i]: x on the scale that models are trained on.
  virtual at::Tensor model_input(int64_t, const at::Tensor& x) const { return x; }
  virtual double start_scale() const { return 1; }  // scale of the noise that x starts from
  // Returns the number of steps for skip(). Smaller than timesteps().size() if a step takes several model
  // calls.
  virtual int64_t step_count() const { return static_cast<int64_t>(timesteps().size()); }
  // Leaves out the first `count` steps: timesteps() begins at the next one, and step() counts from there.
  // REQUIRES: called before the first step(); 0 <= count < step_count().
  virtual void skip(int64_t count) = 0;
  // Returns x at timesteps()[0] for a given x_0. All (B, C, H, W) f32, noise N(0, 1).
  virtual at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const = 0;
};

// config: {"type": "iddpm" | "ddim" | "dpmpp" | .., ...}. docs/samplers.md lists the types and their keys.
// "first_step": number of skipped steps. Throws Error.
std::unique_ptr<Sampler> make_sampler(const nlohmann::json& config);
// Returns the config of kiln sample's --sampler (sampler_names()) for a model trained with `objective`
// (objective.h's config). For pairs that make no sense (flow_euler on epsilon), throws Error that names
// samplers that fit.
nlohmann::json sampler_config(const std::string& name, int64_t num_sampling_steps,
                              const nlohmann::json& objective);
std::vector<std::string> sampler_names();
// Returns whether the sampler draws with models that were trained with `objective`.
bool samples(const std::string& sampler, const nlohmann::json& objective);
// Returns the sampler for a model about which no other is known.
std::string default_sampler(const nlohmann::json& objective);
// Returns the number of steps with which a sampler is commonly used.
int64_t usual_sampling_steps(const std::string& sampler);
// Returns the "first_step" of a sampler that starts from a picture (SDEdit, Meng et al. 2022). It takes the
// share `strength` in (0, 1] of the steps, rounded as in diffusers' image-to-image pipelines. Throws Error.
int64_t first_step_of(double strength, int64_t num_sampling_steps, const nlohmann::json& objective);

// Runs all steps from `noise` (N(0, 1), B, C, H, W). on_step (optional) gets x after each.
at::Tensor run_sampler(Sampler& sampler, const at::Tensor& noise, const DenoiseFn& denoise,
                       const StepNoiseFn& step_noise,
                       const std::function<void(int64_t, const at::Tensor&)>& on_step = {});
// Runs all steps from an x at timesteps()[0], for example from Sampler::noised().
at::Tensor run_sampler_from(Sampler& sampler, at::Tensor x, const DenoiseFn& denoise,
                            const StepNoiseFn& step_noise,
                            const std::function<void(int64_t, const at::Tensor&)>& on_step = {});

}  // namespace kiln
