#include <algorithm>
#include <cmath>
#include <deque>
#include <set>

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
struct UniPcSteps {
  std::vector<double> timesteps, sigmas;
};

UniPcSteps unipc_flow_steps(const JsonConfig& scheduler, int64_t count) {
  const double num_train_timesteps = static_cast<double>(scheduler.positive("num_train_timesteps", 1000));
  const double shift = scheduler.get("flow_shift", 1.0);
  UniPcSteps steps;
  std::vector<double> levels = linspace(1, 1 / num_train_timesteps, count + 1);
  levels.pop_back();
  for (const double level : levels) steps.sigmas.push_back(shift_sigma(level, shift));
  constexpr double kFromPureNoise = 1e-6;  // log(alpha) is not a number at 1
  if (std::abs(steps.sigmas[0] - 1) < kFromPureNoise) steps.sigmas[0] -= kFromPureNoise;
  for (const double sigma : steps.sigmas) steps.timesteps.push_back(std::trunc(sigma * num_train_timesteps));
  steps.sigmas.push_back(steps.sigmas.back());
  return steps;
}

UniPcSteps unipc_schedule_steps(const JsonConfig& scheduler, const std::vector<float>& table, int64_t count) {
  const bool karras = scheduler.get("use_karras_sigmas", false);
  UniPcSteps steps;
  if (!karras && !scheduler.get("use_exponential_sigmas", false)) {
    for (const int64_t t : spaced_solver_timesteps(scheduler, count, static_cast<int64_t>(table.size()))) {
      steps.timesteps.push_back(static_cast<double>(t));
      steps.sigmas.push_back(table[static_cast<size_t>(t)]);
    }
    steps.sigmas.push_back(table.front());
    return steps;
  }
  std::vector<float> log_sigmas;
  log_sigmas.reserve(table.size());
  for (const float sigma : table) log_sigmas.push_back(std::log(sigma));
  steps.sigmas = karras ? karras_sigmas(table.back(), table.front(), count)
                        : exponential_sigmas(table.back(), table.front(), count);
  for (const double sigma : steps.sigmas) {
    const double t = timestep_of_sigma(sigma, log_sigmas);
    steps.timesteps.push_back(std::trunc(karras ? std::nearbyint(t) : t));
  }
  steps.sigmas.push_back(steps.sigmas.back());
  return steps;
}

// Solves a (n, n) x = b (n) for n <= 3 by elimination with pivots.
std::vector<double> solved(std::vector<std::vector<double>> a, std::vector<double> b) {
  const size_t n = b.size();
  for (size_t column = 0; column < n; ++column) {
    size_t pivot = column;
    for (size_t row = column + 1; row < n; ++row)
      if (std::abs(a[row][column]) > std::abs(a[pivot][column])) pivot = row;
    std::swap(a[column], a[pivot]);
    std::swap(b[column], b[pivot]);
    for (size_t row = column + 1; row < n; ++row) {
      const double factor = a[row][column] / a[column][column];
      for (size_t k = column; k < n; ++k) a[row][k] -= factor * a[column][k];
      b[row] -= factor * b[column];
    }
  }
  for (size_t row = n; row-- > 0;) {
    for (size_t k = row + 1; k < n; ++k) b[row] -= a[row][k] * b[k];
    b[row] /= a[row][row];
  }
  return b;
}

class UniPcSampler : public Sampler {
 public:
  UniPcSampler(const JsonConfig& config, const JsonConfig& scheduler)
      : type_(parse_prediction_type("unipc", scheduler.get<std::string>("prediction_type", "epsilon"))),
        order_(scheduler.get<int64_t>("solver_order", 2)),
        flow_(scheduler.get("use_flow_sigmas", false)),
        lower_order_final_(scheduler.get("lower_order_final", true)) {
    for (const char* key : {"thresholding", "use_beta_sigmas", "use_dynamic_shifting"})
      scheduler.refuse(key, false);
    scheduler.refuse("predict_x0", true);
    for (const char* key : {"solver_p", "sigma_min", "sigma_max", "shift_terminal"})
      scheduler.refuse(key, nullptr);
    is_bh1_ = scheduler.choice("solver_type", "bh2", {"bh1", "bh2", "midpoint", "heun", "logrho"}) == "bh1";
    const auto disabled = scheduler.get("disable_corrector", std::vector<int64_t>());
    uncorrected_ = {disabled.begin(), disabled.end()};
    if (order_ < 1 || order_ > 3) fail("unipc", "expected solver_order 1, 2 or 3, got {}", order_);
    if (type_ == PredictionType::kVelocity && !flow_) fail("unipc", "flow_prediction needs use_flow_sigmas");
    std::vector<double> alpha_bars = diffusers_alpha_bars(scheduler);
    if (scheduler.get("rescale_betas_zero_snr", false)) alpha_bars.back() = std::exp2(-24);
    std::vector<float> table;
    for (const double alpha_bar : alpha_bars) {
      const float bar = static_cast<float>(alpha_bar);
      table.push_back(std::sqrt((1.0f - bar) / bar));
    }
    const int64_t count = num_steps(config, static_cast<int64_t>(table.size()));
    steps_ = flow_ ? unipc_flow_steps(scheduler, count) : unipc_schedule_steps(scheduler, table, count);
    for (int64_t i = 1; i < count; ++i)
      if (!(steps_.sigmas[i] < steps_.sigmas[i - 1]))
        fail("unipc", "{} sampling steps are too many: steps {} and {} share a noise level", count, i - 1, i);
    const bool to_zero = scheduler.choice("final_sigmas_type", "zero", {"zero", "sigma_min"}) == "zero";
    if (to_zero) steps_.sigmas.back() = 0;
    if (to_zero && !lower_order_final_ && order_ > 1)
      fail("unipc", "final_sigmas_type zero needs lower_order_final");
    for (double& sigma : steps_.sigmas) sigma = static_cast<float>(sigma);
  }

  const std::vector<double>& timesteps() const override { return steps_.timesteps; }
  bool stochastic() const override { return false; }
  void skip(int64_t count) override {
    drop_first(steps_.timesteps, count);
    drop_first(steps_.sigmas, count);
    std::set<int64_t> uncorrected;
    for (const int64_t step : uncorrected_) uncorrected.insert(step - count);
    uncorrected_ = std::move(uncorrected);
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    const Level first = level(0);
    return first.alpha * x_0 + first.sigma * noise;
  }

  at::Tensor step(int64_t i, const at::Tensor& predicted, const at::Tensor& model_output,
                  const StepNoiseFn&) override {
    if (i == 0) history_.clear();
    const Level now = level(i);
    const at::Tensor x_0 = to_x_0(type_, predicted_channels("unipc", model_output, predicted.size(1)),
                                  predicted, now.alpha, now.sigma);
    at::Tensor x = predicted;
    if (i > 0 && !uncorrected_.contains(i - 1)) x = moved(i - 1, step_order_, last_, &x_0);
    history_.push_front(x_0);
    if (static_cast<int64_t>(history_.size()) > order_) history_.pop_back();
    step_order_ = std::min(order_, i + 1);
    const int64_t left = static_cast<int64_t>(steps_.timesteps.size()) - i;  // steps left, this one included
    if (lower_order_final_) step_order_ = std::min(step_order_, left);
    last_ = x;
    return moved(i, step_order_, x, nullptr);
  }

 private:
  struct Level {
    double alpha, sigma, lambda;  // lambda = log(alpha / sigma)
  };
  Level level(int64_t i) const {
    const double sigma = steps_.sigmas[static_cast<size_t>(i)];
    const double alpha = flow_ ? 1 - sigma : 1 / std::sqrt(sigma * sigma + 1);
    const double scaled = flow_ ? sigma : sigma * alpha;
    return {alpha, scaled, std::log(alpha) - std::log(scaled)};
  }

  // Moves x from level `from` to the next (algorithms 1 and 2 with B_1 or B_2). `arrived`: the prediction at
  // the next level for the corrector, null for the predictor. history_ begins with the prediction at `from`.
  at::Tensor moved(int64_t from, int64_t order, const at::Tensor& x, const at::Tensor* arrived) const {
    const Level now = level(from), next = level(from + 1);
    const double h = next.lambda - now.lambda, z = -h;
    std::vector<double> ratios;
    std::vector<at::Tensor> differences;
    for (int64_t k = 1; k < order; ++k) {
      ratios.push_back((level(from - k).lambda - now.lambda) / h);
      differences.push_back((history_[static_cast<size_t>(k)] - history_[0]) / ratios.back());
    }
    if (arrived) {
      ratios.push_back(1);
      differences.push_back(*arrived - history_[0]);
    }
    const double decay = std::expm1(z), scale = is_bh1_ ? z : decay;
    at::Tensor result = next.sigma / now.sigma * x - next.alpha * decay * history_[0];
    if (differences.empty()) return result;
    const std::vector<double> weights = weights_of(ratios, z, scale);
    at::Tensor change = weights[0] * differences[0];
    for (size_t k = 1; k < weights.size(); ++k) change = change + weights[k] * differences[k];
    return result - next.alpha * scale * change;
  }

  // Returns the weight of each difference. The lowest orders follow the reference, not the equations.
  static std::vector<double> weights_of(const std::vector<double>& ratios, double z, double scale) {
    const size_t n = ratios.size();
    if (n == 1) return {0.5};
    std::vector<std::vector<double>> powers(n, std::vector<double>(n, 1));
    std::vector<double> moments;
    double phi = std::expm1(z) / z - 1, factorial = 1;
    for (size_t row = 0; row < n; ++row) {
      if (row > 0)
        for (size_t k = 0; k < n; ++k) powers[row][k] = powers[row - 1][k] * ratios[k];
      moments.push_back(phi * factorial / scale);
      factorial *= static_cast<double>(row + 2);
      phi = phi / z - 1 / factorial;
    }
    return solved(powers, moments);
  }

  PredictionType type_;
  int64_t order_, step_order_ = 1;
  bool flow_, lower_order_final_, is_bh1_ = false;
  std::set<int64_t> uncorrected_;
  UniPcSteps steps_;
  std::deque<at::Tensor> history_;  // predictions of x_0, newest first
  at::Tensor last_;                 // x before the last predictor
};

}  // namespace

std::unique_ptr<Sampler> make_unipc_sampler(const nlohmann::json& config) {
  const JsonConfig options("unipc", config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<UniPcSampler>(options, JsonConfig("unipc", scheduler));
}

}  // namespace kiln
