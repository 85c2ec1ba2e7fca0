#include "core/aten.h"
#include "core/error.h"
#include "diffusion/flow_objective.h"
#include "diffusion/losses.h"
#include "diffusion/samplers/sampler_types.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

// Returns the levels before the shift: the given ones, or evenly spaced ones from the first to the last level
// of the (shifted) training table.
std::vector<double> unshifted_sigmas(const JsonConfig& config, int64_t num_train_timesteps, double shift) {
  const int64_t steps = num_steps(config, num_train_timesteps);
  if (config.has("sigmas")) {
    auto sigmas = config.require<std::vector<double>>("sigmas");
    if (static_cast<int64_t>(sigmas.size()) != steps)
      fail(config.who(), "expected {} sigmas, one per step, got {}", steps, sigmas.size());
    return sigmas;
  }
  const std::vector<double> table = diffusers_flow_table(num_train_timesteps, shift).sigmas;
  const double scale = static_cast<double>(num_train_timesteps);
  std::vector<double> sigmas = linspace(table.front() * scale, table.back() * scale, steps);
  for (double& sigma : sigmas) sigma /= scale;
  return sigmas;
}

class FlowEulerSampler : public Sampler {
 public:
  FlowEulerSampler(const JsonConfig& config, const JsonConfig& scheduler)
      : stochastic_(scheduler.get("stochastic_sampling", false)) {
    scheduler.refuse("use_dynamic_shifting", false);
    scheduler.refuse("invert_sigmas", false);
    scheduler.refuse("use_beta_sigmas", false);
    const int64_t num_train_timesteps = scheduler.positive("num_train_timesteps", 1000);
    const double shift = scheduler.get("shift", 1.0);
    if (!(shift > 0)) fail(scheduler.who(), "expected shift to be positive, got {}", shift);
    std::vector<double> sigmas = unshifted_sigmas(config, num_train_timesteps, shift);
    for (double& sigma : sigmas) sigma = shift_sigma(sigma, shift);
    if (const double terminal = scheduler.get("shift_terminal", 0.0); terminal != 0) {
      const double factor = (1 - sigmas.back()) / (1 - terminal);
      for (double& sigma : sigmas) sigma = 1 - (1 - sigma) / factor;
    }
    const int64_t count = static_cast<int64_t>(sigmas.size());
    if (scheduler.get("use_karras_sigmas", false))
      sigmas = karras_sigmas(sigmas.front(), sigmas.back(), count);
    if (scheduler.get("use_exponential_sigmas", false))
      sigmas = exponential_sigmas(sigmas.front(), sigmas.back(), count);
    for (double sigma : sigmas) {
      sigmas_.push_back(static_cast<float>(sigma));
      timesteps_.push_back(static_cast<float>(sigma) * static_cast<float>(num_train_timesteps));
    }
    sigmas_.push_back(0);
  }

  const std::vector<double>& timesteps() const override { return timesteps_; }
  bool stochastic() const override { return stochastic_; }
  void skip(int64_t count) override {
    drop_first(timesteps_, count);
    drop_first(sigmas_, count);
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    const double sigma = sigmas_[0];
    return (1 - sigma) * x_0 + sigma * noise;
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn& noise) override {
    const at::Tensor velocity = predicted_channels("flow_euler", model_output, x.size(1));
    const double sigma = sigmas_[i], next = sigmas_[i + 1];
    if (!stochastic_) return x + static_cast<double>(sigmas_[i + 1] - sigmas_[i]) * velocity;
    const at::Tensor x_0 = x - sigma * velocity;
    return next > 0 ? (1 - next) * x_0 + next * noise(i) : x_0;
  }

 private:
  bool stochastic_;
  std::vector<float> sigmas_;  // one more than steps; f32 like the reference
  std::vector<double> timesteps_;
};

}  // namespace

std::unique_ptr<Sampler> make_flow_euler_sampler(const nlohmann::json& config) {
  const JsonConfig options("flow_euler", config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<FlowEulerSampler>(options, JsonConfig("flow_euler", scheduler));
}

}  // namespace kiln
