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

enum class VarianceType { kFixedSmall, kFixedLarge, kLearned, kLearnedRange };

VarianceType parse_variance_type(const JsonConfig& scheduler) {
  const std::string name =
      scheduler.choice("variance_type", "fixed_small",
                       {"fixed_small", "fixed_small_log", "fixed_large", "learned", "learned_range"});
  if (name == "fixed_large") return VarianceType::kFixedLarge;
  if (name == "learned") return VarianceType::kLearned;
  if (name == "learned_range") return VarianceType::kLearnedRange;
  return VarianceType::kFixedSmall;  // fixed_small_log is the same number
}

class DdpmSampler : public Sampler {
 public:
  DdpmSampler(const JsonConfig& config, const JsonConfig& scheduler)
      : alpha_bars_(diffusers_alpha_bars(scheduler)),
        type_(parse_prediction_type("ddpm", scheduler.get<std::string>("prediction_type", "epsilon"))),
        variance_type_(parse_variance_type(scheduler)),
        clip_(scheduler.get("clip_sample", true) ? scheduler.get("clip_sample_range", 1.0) : 0) {
    scheduler.refuse("thresholding", false);
    if (type_ == PredictionType::kVelocity) fail("ddpm", "flow_prediction needs flow_euler or dpmpp");
    const int64_t steps = num_steps(config, static_cast<int64_t>(alpha_bars_.size()));
    const std::vector<int64_t> spaced = spaced_timesteps(scheduler, steps, "leading");
    timesteps_.assign(spaced.begin(), spaced.end());
  }

  const std::vector<double>& timesteps() const override { return timesteps_; }
  bool stochastic() const override { return true; }
  void skip(int64_t count) override { drop_first(timesteps_, count); }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    return noised_at(alpha_bars_[static_cast<size_t>(timesteps_[0])], x_0, noise);
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn& noise) override {
    const at::Tensor output = predicted_channels("ddpm", model_output, x.size(1));
    const bool last = i + 1 == static_cast<int64_t>(timesteps_.size());
    const double bar = alpha_bars_[static_cast<size_t>(timesteps_[i])];
    const double previous = last ? 1.0 : alpha_bars_[static_cast<size_t>(timesteps_[i + 1])];
    const double alpha = bar / previous, beta = 1 - alpha;  // of this step, which may span several timesteps
    at::Tensor x_0 = to_x_0(type_, output, x, std::sqrt(bar), std::sqrt(1 - bar));
    if (clip_ > 0) x_0 = x_0.clamp(-clip_, clip_);
    // Eq. 7.
    at::Tensor next =
        (std::sqrt(previous) * beta / (1 - bar)) * x_0 + (std::sqrt(alpha) * (1 - previous) / (1 - bar)) * x;
    if (timesteps_[i] == 0) return next;
    const double posterior = std::max((1 - previous) / (1 - bar) * beta, 1e-20);
    switch (variance_type_) {
      case VarianceType::kFixedSmall:
        return next + std::sqrt(posterior) * noise(i);
      case VarianceType::kFixedLarge:
        return next + std::sqrt(beta) * noise(i);
      case VarianceType::kLearned:
        return next + predicted_variance(model_output, x).sqrt() * noise(i);
      case VarianceType::kLearnedRange: {
        const at::Tensor fraction = (predicted_variance(model_output, x) + 1) / 2;
        return next +
               (0.5 * (fraction * std::log(beta) + (1 - fraction) * std::log(posterior))).exp() * noise(i);
      }
    }
    return next;
  }

 private:
  static at::Tensor predicted_variance(const at::Tensor& model_output, const at::Tensor& x) {
    check_channels("ddpm", model_output, 2 * x.size(1), "variance_type is learned");
    return model_output.narrow(1, x.size(1), x.size(1));
  }

  std::vector<double> alpha_bars_;
  PredictionType type_;
  VarianceType variance_type_;
  double clip_;
  std::vector<double> timesteps_;
};

}  // namespace

std::unique_ptr<Sampler> make_ddpm_sampler(const nlohmann::json& config) {
  const JsonConfig options("ddpm", config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<DdpmSampler>(options, JsonConfig("ddpm", scheduler));
}

}  // namespace kiln
