#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "core/json_config.h"
#include "diffusion/losses.h"
#include "diffusion/samplers/conversion.h"
#include "diffusion/samplers/sampler_types.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

constexpr const char* kWhoDpms = "pixart_dpms";
constexpr double kLowestLambda = -5.1;  // the schedule ends before its half log-SNR falls below this
constexpr int64_t kDpmsOrder = 2;

// Returns 0.5 log(alpha_bar) of the training timesteps.
std::vector<double> log_alphas(const JsonConfig& config) {
  std::vector<double> logs;
  if (config.has("scheduler")) {
    const nlohmann::json scheduler = config.object("scheduler");
    for (const double alpha_bar : diffusers_alpha_bars(JsonConfig(kWhoDpms, scheduler)))
      logs.push_back(0.5 * std::log(alpha_bar));
  } else {
    double sum = 0;
    for (const double beta : iddpm_betas(config.get<std::string>("beta_schedule", "linear"),
                                         config.positive("num_train_timesteps", 1000)))
      logs.push_back(0.5 * (sum += std::log(1 - beta)));
  }
  const auto lambda = [](double log_alpha) {
    return log_alpha - 0.5 * std::log(1 - std::exp(2 * log_alpha));
  };
  while (logs.size() > 2 && lambda(logs.back()) < kLowestLambda) logs.pop_back();
  return logs;
}

// Computes alpha, sigma and half log-SNR at a continuous time, in f32 like the reference: near t = 0 the
// rounding of 1 - alpha^2 is no smaller than the sampler's tolerance.
class ContinuousSchedule {
 public:
  struct Level {
    float alpha, sigma, lambda;
  };

  explicit ContinuousSchedule(const std::vector<double>& logs) : logs_(logs.begin(), logs.end()) {}

  float first_time() const { return static_cast<float>(1 / size()); }
  float model_time(float t) const { return (t - first_time()) * 1000.0f; }

  Level at(float t) const {
    const auto last = static_cast<int64_t>(logs_.size()) - 2;
    const int64_t i = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(t * size())) - 2, 0, last);
    const float from = time_of(i), to = time_of(i + 1);
    const float low = logs_[static_cast<size_t>(i)], high = logs_[static_cast<size_t>(i) + 1];
    const float log_alpha = low + (t - from) * (high - low) / (to - from);
    const float rest = 1.0f - std::exp(2.0f * log_alpha);
    return {std::exp(log_alpha), std::sqrt(rest), log_alpha - 0.5f * std::log(rest)};
  }

 private:
  double size() const { return static_cast<double>(logs_.size()); }
  float time_of(int64_t i) const { return static_cast<float>(static_cast<double>(i + 1) / size()); }

  std::vector<float> logs_;
};

class PixartDpmsSampler : public Sampler {
 public:
  explicit PixartDpmsSampler(const JsonConfig& config)
      : type_(parse_prediction_type(kWhoDpms, config.get<std::string>("prediction_type", "epsilon"))),
        schedule_(log_alphas(config)) {
    if (type_ == PredictionType::kVelocity) fail(kWhoDpms, "flow_prediction needs flow_euler or dpmpp");
    const int64_t steps = num_steps(config, config.positive("num_train_timesteps", 1000));
    if (steps < kDpmsOrder) fail(kWhoDpms, "expected at least {} steps, got {}", kDpmsOrder, steps);
    for (const double time : linspace(1, schedule_.first_time(), steps + 1)) {
      times_.push_back(static_cast<float>(time));
      timesteps_.push_back(schedule_.model_time(times_.back()));
    }
    timesteps_.pop_back();
  }

  const std::vector<double>& timesteps() const override { return timesteps_; }
  bool stochastic() const override { return false; }
  void skip(int64_t count) override {
    drop_first(times_, count);
    drop_first(timesteps_, count);
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    const auto first = schedule_.at(times_[0]);
    return static_cast<double>(first.alpha) * x_0 + static_cast<double>(first.sigma) * noise;
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn&) override {
    const auto now = schedule_.at(times_[i]), next = schedule_.at(times_[i + 1]);
    const at::Tensor x_0 =
        to_x_0(type_, predicted_channels(kWhoDpms, model_output, x.size(1)), x, now.alpha, now.sigma);
    const float h = next.lambda - now.lambda, step = next.alpha * std::expm1(-h);
    at::Tensor result = static_cast<double>(next.sigma / now.sigma) * x - static_cast<double>(step) * x_0;
    const bool last = i + 2 == static_cast<int64_t>(times_.size());
    if (i > 0 && !last) {
      const float ratio = (now.lambda - schedule_.at(times_[i - 1]).lambda) / h;
      result = result - static_cast<double>(0.5f * step / ratio) * (x_0 - previous_x_0_);
    }
    previous_x_0_ = x_0;
    return result;
  }

 private:
  PredictionType type_;
  ContinuousSchedule schedule_;
  std::vector<float> times_;  // one more than steps
  std::vector<double> timesteps_;
  at::Tensor previous_x_0_;
};

}  // namespace

std::unique_ptr<Sampler> make_pixart_dpms_sampler(const nlohmann::json& config) {
  return std::make_unique<PixartDpmsSampler>(JsonConfig(kWhoDpms, config));
}

}  // namespace kiln
