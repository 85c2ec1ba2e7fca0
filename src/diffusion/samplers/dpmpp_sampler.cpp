#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/losses.h"
#include "diffusion/samplers/conversion.h"
#include "diffusion/samplers/sampler_types.h"
#include "diffusion/samplers/spacing.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

// Integer timesteps and their noise levels, with one more level at the end.
struct SolverSteps {
  std::vector<double> timesteps;
  std::vector<float> sigmas;
};

// Spaces the log-SNR evenly (Lu et al.'s own spacing).
std::vector<double> uniform_log_snr_sigmas(const std::vector<float>& log_sigmas, int64_t count) {
  std::vector<double> sigmas;
  for (double ramp : linspace(0, 1, count))
    sigmas.push_back(std::exp(log_sigmas.back() + ramp * (double(log_sigmas.front()) - log_sigmas.back())));
  return sigmas;
}

SolverSteps flow_steps(const JsonConfig& scheduler, int64_t count) {
  const double shift = scheduler.get("flow_shift", 1.0);
  const double num_train_timesteps = static_cast<double>(scheduler.positive("num_train_timesteps", 1000));
  const std::vector<double> alphas = linspace(1, 1 / num_train_timesteps, count + 1);
  SolverSteps steps;
  for (int64_t i = count; i > 0; --i) {
    const double sigma = shift_sigma(1 - alphas[i], shift);
    steps.sigmas.push_back(static_cast<float>(sigma));
    steps.timesteps.push_back(std::trunc(sigma * num_train_timesteps));
  }
  return steps;
}

SolverSteps schedule_steps(const JsonConfig& scheduler, const std::vector<double>& alpha_bars,
                           int64_t count) {
  std::vector<float> sigmas, log_sigmas;
  int64_t end = static_cast<int64_t>(alpha_bars.size());
  const double lambda_min = scheduler.get("lambda_min_clipped", -std::numeric_limits<double>::infinity());
  for (double alpha_bar : alpha_bars) {
    const float bar = static_cast<float>(alpha_bar);
    sigmas.push_back(std::sqrt((1.0f - bar) / bar));
    log_sigmas.push_back(std::log(sigmas.back()));
    if (std::log(std::sqrt(bar)) - std::log(std::sqrt(1.0f - bar)) < lambda_min) --end;
  }
  const bool karras = scheduler.get("use_karras_sigmas", false);
  const bool uniform_log_snr = scheduler.get("use_lu_lambdas", false);
  const bool exponential = scheduler.get("use_exponential_sigmas", false);
  SolverSteps steps;
  if (!karras && !uniform_log_snr && !exponential) {
    for (int64_t t : spaced_solver_timesteps(scheduler, count, end)) {
      steps.timesteps.push_back(static_cast<double>(t));
      steps.sigmas.push_back(sigmas[t]);
    }
    return steps;
  }
  const bool rounds =
      !exponential && scheduler.get<std::string>("beta_schedule", "linear") != "squaredcos_cap_v2";
  const std::vector<double> levels = karras ? karras_sigmas(sigmas.back(), sigmas.front(), count)
                                     : uniform_log_snr
                                         ? uniform_log_snr_sigmas(log_sigmas, count)
                                         : exponential_sigmas(sigmas.back(), sigmas.front(), count);
  for (double sigma : levels) {
    const double t = timestep_of_sigma(sigma, log_sigmas);
    steps.timesteps.push_back(std::trunc(rounds ? std::nearbyint(t) : t));
    steps.sigmas.push_back(static_cast<float>(sigma));
  }
  return steps;
}

class DpmppSampler : public Sampler {
 public:
  DpmppSampler(const JsonConfig& config, const JsonConfig& scheduler)
      : type_(parse_prediction_type("dpmpp", scheduler.get<std::string>("prediction_type", "epsilon"))),
        order_(scheduler.get<int64_t>("solver_order", 2)),
        stochastic_(scheduler.choice("algorithm_type", "dpmsolver++", {"dpmsolver++", "sde-dpmsolver++"}) !=
                    "dpmsolver++"),
        heun_(scheduler.choice("solver_type", "midpoint", {"midpoint", "heun"}) == "heun"),
        flow_(scheduler.get("use_flow_sigmas", false)) {
    scheduler.refuse("thresholding", false);
    scheduler.refuse("use_beta_sigmas", false);
    scheduler.refuse("use_dynamic_shifting", false);
    if (order_ < 1 || order_ > 3) fail("dpmpp", "expected solver_order 1, 2 or 3, got {}", order_);
    if (type_ == PredictionType::kVelocity && !flow_) fail("dpmpp", "flow_prediction needs use_flow_sigmas");
    std::vector<double> alpha_bars = diffusers_alpha_bars(scheduler);
    if (scheduler.get("rescale_betas_zero_snr", false)) alpha_bars.back() = std::exp2(-24);  // avoids log(0)
    const int64_t count = num_steps(config, static_cast<int64_t>(alpha_bars.size()));
    steps_ = flow_ ? flow_steps(scheduler, count) : schedule_steps(scheduler, alpha_bars, count);
    for (size_t i = 1; i < steps_.sigmas.size(); ++i)
      if (!(steps_.sigmas[i] < steps_.sigmas[i - 1]))
        fail("dpmpp", "{} sampling steps are too many: steps {} and {} share a noise level", count, i - 1, i);
    const bool to_zero = scheduler.choice("final_sigmas_type", "zero", {"zero", "sigma_min"}) == "zero";
    steps_.sigmas.push_back(to_zero ? 0 : static_cast<float>(std::sqrt((1 - alpha_bars[0]) / alpha_bars[0])));
    const bool few = steps_.timesteps.size() < 15 && scheduler.get("lower_order_final", true);
    first_order_last_ = to_zero || few || scheduler.get("euler_at_final", false);
    second_order_second_last_ = few;
  }

  const std::vector<double>& timesteps() const override { return steps_.timesteps; }
  bool stochastic() const override { return stochastic_; }
  void skip(int64_t count) override {
    drop_first(steps_.timesteps, count);
    drop_first(steps_.sigmas, count);
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    const Level first = level(0);
    return first.alpha * x_0 + first.sigma * noise;
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn& noise) override {
    if (i == 0) history_.clear();
    const Level now = level(i), next = level(i + 1);
    history_.push_front(
        to_x_0(type_, predicted_channels("dpmpp", model_output, x.size(1)), x, now.alpha, now.sigma));
    const int64_t order = order_at(i);
    const double h = next.lambda - now.lambda;
    // The stochastic solver runs at twice the rate and adds the noise back.
    const double rate = stochastic_ ? 2 : 1;
    const double base = -next.alpha * std::expm1(-rate * h);
    at::Tensor result = (next.sigma / now.sigma * (stochastic_ ? std::exp(-h) : 1)) * x + base * history_[0];
    if (order >= 2) result = result + correction(i, order, h, rate, next.alpha, base);
    if (stochastic_ && next.sigma > 0)
      result = result + next.sigma * std::sqrt(-std::expm1(-2 * h)) * noise(i);
    if (static_cast<int64_t>(history_.size()) >= order_) history_.pop_back();
    return result;
  }

 private:
  struct Level {
    double alpha, sigma, lambda;  // lambda = log(alpha / sigma)
  };
  Level level(int64_t i) const {
    const double sigma = steps_.sigmas[i];
    const double alpha = flow_ ? 1 - sigma : 1 / std::sqrt(sigma * sigma + 1);
    const double scaled = flow_ ? sigma : sigma * alpha;
    return {alpha, scaled, std::log(alpha) - std::log(scaled)};
  }

  int64_t order_at(int64_t i) const {
    const int64_t left = static_cast<int64_t>(steps_.timesteps.size()) - i;  // steps left, this one included
    int64_t order = std::min({order_, i + 1, static_cast<int64_t>(history_.size())});
    if (left == 1 && first_order_last_) order = 1;
    if (left == 2 && second_order_second_last_) order = std::min<int64_t>(order, 2);
    return order;
  }

  // Returns the terms of the first and second differences of x_0 over lambda.
  at::Tensor correction(int64_t i, int64_t order, double h, double rate, double alpha, double base) const {
    const double z = rate * h, decay = std::expm1(-z);
    const double slope = alpha * (decay / z + 1);
    const double h_0 = level(i).lambda - level(i - 1).lambda, r_0 = h_0 / h;
    const at::Tensor d_0 = (history_[0] - history_[1]) / r_0;
    if (order == 2) return (heun_ ? slope : 0.5 * base) * d_0;
    const double h_1 = level(i - 1).lambda - level(i - 2).lambda, r_1 = h_1 / h;
    const at::Tensor d_1 = (history_[1] - history_[2]) / r_1;
    const at::Tensor first = d_0 + (r_0 / (r_0 + r_1)) * (d_0 - d_1);
    const at::Tensor second = (d_0 - d_1) / (r_0 + r_1);
    return slope * first + curvature(alpha, z, decay) * second;
  }

  double curvature(double alpha, double z, double decay) const {
    const double term = (decay + z) / (z * z) - 0.5;
    // The reference's stochastic form has the opposite sign inside: (1 - e^-2h - 2h) / (2h)^2 - 1/2.
    return stochastic_ ? alpha * (-(decay + z) / (z * z) - 0.5) : -alpha * term;
  }

  PredictionType type_;
  int64_t order_;
  bool stochastic_, heun_, flow_;
  bool first_order_last_ = false, second_order_second_last_ = false;
  SolverSteps steps_;
  std::deque<at::Tensor> history_;  // predictions of x_0, newest first
};

}  // namespace

std::unique_ptr<Sampler> make_dpmpp_sampler(const nlohmann::json& config) {
  const JsonConfig options("dpmpp", config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<DpmppSampler>(options, JsonConfig("dpmpp", scheduler));
}

}  // namespace kiln
