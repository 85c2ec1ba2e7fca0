#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/losses.h"
#include "diffusion/samplers/conversion.h"
#include "diffusion/samplers/sampler_types.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

class DdimSampler : public Sampler {
 public:
  DdimSampler(const JsonConfig& config, const JsonConfig& scheduler)
      : alpha_bars_(diffusers_alpha_bars(scheduler)),
        type_(parse_prediction_type("ddim", scheduler.get<std::string>("prediction_type", "epsilon"))),
        clip_(scheduler.get("clip_sample", true) ? scheduler.get("clip_sample_range", 1.0) : 0),
        final_alpha_bar_(scheduler.get("set_alpha_to_one", true) ? 1.0 : alpha_bars_.front()),
        eta_(config.get("eta", 0.0)) {
    scheduler.refuse("thresholding", false);
    if (type_ == PredictionType::kVelocity) fail("ddim", "flow_prediction needs flow_euler or dpmpp");
    if (!(eta_ >= 0)) fail("ddim", "expected eta to be 0 or more, got {}", eta_);
    const int64_t num_train_timesteps = static_cast<int64_t>(alpha_bars_.size());
    const int64_t steps = num_steps(config, num_train_timesteps);
    const std::vector<int64_t> spaced = spaced_timesteps(scheduler, steps, "leading");
    timesteps_.assign(spaced.begin(), spaced.end());
    const bool consecutive = config.get("consecutive", false);
    for (size_t i = 0; i < spaced.size(); ++i) {
      const int64_t next = i + 1 < spaced.size() ? spaced[i + 1] : -1;
      previous_.push_back(consecutive ? next : spaced[i] - num_train_timesteps / steps);
    }
  }

  const std::vector<double>& timesteps() const override { return timesteps_; }
  bool stochastic() const override { return eta_ > 0; }
  void skip(int64_t count) override {
    drop_first(timesteps_, count);
    drop_first(previous_, count);
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    return noised_at(alpha_bars_[static_cast<size_t>(timesteps_[0])], x_0, noise);
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn& noise) override {
    const at::Tensor output = predicted_channels("ddim", model_output, x.size(1));
    const double bar = alpha_bars_[static_cast<size_t>(timesteps_[i])];
    const double previous = previous_[i] >= 0 ? alpha_bars_[previous_[i]] : final_alpha_bar_;
    const double alpha_t = std::sqrt(bar), sigma_t = std::sqrt(1 - bar);
    at::Tensor x_0 = to_x_0(type_, output, x, alpha_t, sigma_t);
    if (clip_ > 0) x_0 = x_0.clamp(-clip_, clip_);
    // Eq. 12 and 16. As in diffusers, epsilon is that of the unclipped prediction.
    const double deviation =
        eta_ * std::sqrt(std::max((1 - previous) / (1 - bar) * (1 - bar / previous), 0.0));
    const double direction = std::sqrt(std::max(1 - previous - deviation * deviation, 0.0));
    at::Tensor next = std::sqrt(previous) * x_0 + direction * to_epsilon(type_, output, x, alpha_t, sigma_t);
    return deviation > 0 ? next + deviation * noise(i) : next;
  }

 private:
  std::vector<double> alpha_bars_;
  PredictionType type_;
  double clip_, final_alpha_bar_, eta_;
  std::vector<double> timesteps_;
  std::vector<int64_t> previous_;  // timestep after each step; negative if clean
};

}  // namespace

std::unique_ptr<Sampler> make_ddim_sampler(const nlohmann::json& config) {
  const JsonConfig options("ddim", config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<DdimSampler>(options, JsonConfig("ddim", scheduler));
}

}  // namespace kiln
