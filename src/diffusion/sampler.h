// Samplers. They never see a model: a DenoiseFn arrives.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kiln {

// (x (B, C, H, W) f32, model timestep) -> raw model output (B, C or 2C, H, W) f32, guidance already applied.
using DenoiseFn = std::function<at::Tensor(const at::Tensor& x, double model_t)>;
// The normal draw of a step, (B, C, H, W) f32; called only where the sampler adds noise (not at t = 0).
using StepNoiseFn = std::function<at::Tensor(int64_t step)>;

class Sampler {
 public:
  virtual ~Sampler() = default;
  virtual const std::vector<double>& timesteps() const = 0;  // as the model is given them, in order of use
  // One step: x at timesteps()[i] -> x at the next. Multistep samplers keep history: steps go in order from
  // 0.
  virtual at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                          const StepNoiseFn& noise) = 0;
  virtual bool stochastic() const = 0;
  // What the model is given at timesteps()[i]: x on the scale that models are trained on.
  virtual at::Tensor model_input(int64_t, const at::Tensor& x) const { return x; }
  virtual double start_scale() const { return 1; }  // of the noise that x starts from
  // How many steps there are to skip; where a step takes several calls, fewer than timesteps() has.
  virtual int64_t step_count() const { return static_cast<int64_t>(timesteps().size()); }
  // Leaves out the first `count` steps: timesteps() begins at the next, and steps are counted from there.
  // Before the first step(). REQUIRES: 0 <= count < step_count().
  virtual void skip(int64_t count) = 0;
  // x at timesteps()[0] of a given x_0; both (B, C, H, W) f32, noise N(0, 1).
  virtual at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const = 0;
};

// config: {"type": "iddpm" | "ddim" | "dpmpp" | .., ...}: docs/samplers.md lists the types and their keys;
// "first_step": how many are skipped. Throws Error.
std::unique_ptr<Sampler> make_sampler(const nlohmann::json& config);
// The config behind kiln sample's --sampler (sampler_names()) for a model trained with `objective`
// (objective.h's config). Throws Error for pairs that make no sense (flow_euler on epsilon) saying which do.
nlohmann::json sampler_config(const std::string& name, int64_t num_sampling_steps,
                              const nlohmann::json& objective);
std::vector<std::string> sampler_names();
// The "first_step" of a sampler that starts from a picture (SDEdit, Meng et al. 2022): of the steps, the
// share `strength` in (0, 1] is made, rounded as the image-to-image pipelines of diffusers round it. Throws
// Error.
int64_t first_step_of(double strength, int64_t num_sampling_steps, const nlohmann::json& objective);

// All steps from `noise` (N(0, 1), B, C, H, W); on_step (optional) sees x after each.
at::Tensor run_sampler(Sampler& sampler, const at::Tensor& noise, const DenoiseFn& denoise,
                       const StepNoiseFn& step_noise,
                       const std::function<void(int64_t, const at::Tensor&)>& on_step = {});
// All steps from x as it is at timesteps()[0], such as Sampler::noised() makes it.
at::Tensor run_sampler_from(Sampler& sampler, at::Tensor x, const DenoiseFn& denoise,
                            const StepNoiseFn& step_noise,
                            const std::function<void(int64_t, const at::Tensor&)>& on_step = {});

}  // namespace kiln
