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

struct EulerSteps {
  std::vector<double> timesteps;  // may be fractional
  std::vector<double> sigmas;     // one more than timesteps
  double start_scale = 1;
};

// With "linspace" both schedulers use fractional timesteps.
std::vector<double> euler_timesteps(const JsonConfig& scheduler, int64_t count, int64_t num_train_timesteps) {
  const std::string spacing =
      scheduler.choice("timestep_spacing", "linspace", {"linspace", "leading", "trailing"});
  if (spacing != "linspace") {
    const std::vector<int64_t> spaced = spaced_timesteps(scheduler, count, "linspace");
    return {spaced.begin(), spaced.end()};
  }
  std::vector<double> timesteps = linspace(0, static_cast<double>(num_train_timesteps - 1), count);
  for (double& t : timesteps) t = static_cast<float>(t);
  std::ranges::reverse(timesteps);
  return timesteps;
}

// Replaces the levels by Karras or exponential ones, if configured. The timesteps follow from the levels.
void respace(const JsonConfig& scheduler, const std::vector<float>& table, EulerSteps& steps) {
  const bool karras = scheduler.get("use_karras_sigmas", false);
  if (!karras && !scheduler.get("use_exponential_sigmas", false)) return;
  std::vector<float> log_sigmas;
  log_sigmas.reserve(table.size());
  for (const float sigma : table) log_sigmas.push_back(std::log(sigma));
  const double highest = steps.sigmas.front(), lowest = steps.sigmas.back();
  const int64_t count = static_cast<int64_t>(steps.sigmas.size());
  steps.sigmas = karras ? karras_sigmas(highest, lowest, count) : exponential_sigmas(highest, lowest, count);
  for (int64_t i = 0; i < count; ++i)
    steps.timesteps[i] = static_cast<float>(timestep_of_sigma(steps.sigmas[i], log_sigmas));
}

EulerSteps euler_steps(const JsonConfig& config, const JsonConfig& scheduler) {
  std::vector<double> alpha_bars = diffusers_alpha_bars(scheduler);
  if (scheduler.get("rescale_betas_zero_snr", false)) alpha_bars.back() = std::exp2(-24);  // avoids 1/0
  std::vector<float> table;
  for (const double alpha_bar : alpha_bars) {
    const float bar = static_cast<float>(alpha_bar);
    table.push_back(std::sqrt((1.0f - bar) / bar));
  }
  const int64_t num_train_timesteps = static_cast<int64_t>(table.size());
  const int64_t count = num_steps(config, num_train_timesteps);
  EulerSteps steps{.timesteps = euler_timesteps(scheduler, count, num_train_timesteps), .sigmas = {}};
  for (const double t : steps.timesteps) {
    const auto low = std::min(static_cast<size_t>(t), table.size() - 1),
               high = std::min(low + 1, table.size() - 1);
    const double fraction = t - static_cast<double>(low);
    steps.sigmas.push_back(table[low] + fraction * (double(table[high]) - table[low]));
  }
  respace(scheduler, table, steps);
  const bool to_zero = scheduler.choice("final_sigmas_type", "zero", {"zero", "sigma_min"}) == "zero";
  steps.sigmas.push_back(to_zero ? 0 : table.front());
  for (double& sigma : steps.sigmas) sigma = static_cast<float>(sigma);
  const double highest = *std::ranges::max_element(steps.sigmas);
  const bool is_leading = scheduler.get<std::string>("timestep_spacing", "linspace") == "leading";
  steps.start_scale = is_leading ? std::sqrt(highest * highest + 1) : highest;
  return steps;
}

class EulerSampler : public Sampler {
 public:
  EulerSampler(const char* who, const JsonConfig& config, const JsonConfig& scheduler, bool ancestral)
      : who_(who),
        type_(parse_prediction_type(who, scheduler.get<std::string>("prediction_type", "epsilon"))),
        ancestral_(ancestral) {
    if (type_ == PredictionType::kVelocity) fail(who, "flow_prediction needs flow_euler, unipc or dpmpp");
    scheduler.refuse("use_beta_sigmas", false);
    scheduler.refuse("interpolation_type", "linear");
    scheduler.refuse("timestep_type", "discrete");
    scheduler.refuse("sigma_min", nullptr);
    scheduler.refuse("sigma_max", nullptr);
    steps_ = euler_steps(config, scheduler);
  }

  const std::vector<double>& timesteps() const override { return steps_.timesteps; }
  bool stochastic() const override { return ancestral_; }
  double start_scale() const override { return steps_.start_scale; }
  void skip(int64_t count) override {
    drop_first(steps_.timesteps, count);
    drop_first(steps_.sigmas, count);
  }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    return x_0 + steps_.sigmas[0] * noise;
  }
  at::Tensor model_input(int64_t i, const at::Tensor& x) const override { return x * alpha(i); }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& model_output,
                  const StepNoiseFn& noise) override {
    const double sigma = steps_.sigmas[i], next = steps_.sigmas[i + 1];
    const at::Tensor output = predicted_channels(who_, model_output, x.size(1));
    const at::Tensor x_0 = to_x_0(type_, output, model_input(i, x), alpha(i), sigma * alpha(i));
    const at::Tensor slope = (x - x_0) / sigma;
    if (!ancestral_) return x + slope * (next - sigma);
    const double up = next * std::sqrt(std::max(sigma * sigma - next * next, 0.0)) / sigma;
    const double down = std::sqrt(std::max(next * next - up * up, 0.0));
    const at::Tensor result = x + slope * (down - sigma);
    return up > 0 ? result + up * noise(i) : result;
  }

 private:
  double alpha(int64_t i) const { return 1 / std::sqrt(steps_.sigmas[i] * steps_.sigmas[i] + 1); }

  const char* who_;
  PredictionType type_;
  bool ancestral_;
  EulerSteps steps_;
};

std::unique_ptr<Sampler> make(const char* who, const nlohmann::json& config, bool ancestral) {
  const JsonConfig options(who, config);
  const nlohmann::json scheduler = options.object("scheduler");
  return std::make_unique<EulerSampler>(who, options, JsonConfig(who, scheduler), ancestral);
}

}  // namespace

std::unique_ptr<Sampler> make_euler_sampler(const nlohmann::json& config) {
  return make("euler", config, /*ancestral=*/false);
}

std::unique_ptr<Sampler> make_euler_ancestral_sampler(const nlohmann::json& config) {
  return make("euler_ancestral", config, /*ancestral=*/true);
}

}  // namespace kiln
