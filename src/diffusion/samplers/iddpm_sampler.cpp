#include <algorithm>
#include <charconv>
#include <cmath>
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

struct IddpmOptions {
  bool learn_sigma, sigma_small, clip_denoised;
};

int64_t parse_count(std::string_view text, const std::string& respacing) {
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || count < 1)
    fail("iddpm", "expected sampling steps like \"250\", \"10,15,20\" or \"ddim25\", got \"{}\"", respacing);
  return count;
}

// "steps" may be a number or a string.
std::string steps_of(const JsonConfig& config) {
  if (!config.has("steps")) fail(config.who(), "expected \"steps\" in the sampler's config");
  const nlohmann::json& steps = config.at("steps");
  if (is_integer(steps)) return std::to_string(steps.get<int64_t>());
  return config.get<std::string>("steps", "");
}

// The kept timesteps, and the tables of a schedule that has their alpha_bar.
struct Respaced {
  std::vector<int64_t> kept;
  IddpmTables tables;
};
Respaced respace(const JsonConfig& config) {
  const int64_t num_train_timesteps = config.positive("num_train_timesteps", 1000);
  const std::vector<double> alpha_bars =
      cumulative_alphas(iddpm_betas(config.get<std::string>("beta_schedule", "linear"), num_train_timesteps));
  std::vector<int64_t> kept = respaced_timesteps(num_train_timesteps, steps_of(config));
  std::vector<double> betas;
  double previous = 1;
  for (int64_t t : kept) {
    betas.push_back(1 - alpha_bars[t] / previous);
    previous = alpha_bars[t];
  }
  return {std::move(kept), IddpmTables(std::move(betas))};
}

// Both samplers share respacing, the prediction of x_0 and the split of a learned sigma.
class IddpmSamplerBase : public Sampler {
 public:
  explicit IddpmSamplerBase(const JsonConfig& config)
      : options_{config.get("learn_sigma", true), config.get("sigma_small", false),
                 config.get("clip_denoised", false)},
        respaced_(respace(config)) {
    for (auto t = respaced_.kept.rbegin(); t != respaced_.kept.rend(); ++t)
      timesteps_.push_back(static_cast<double>(*t));
  }
  const std::vector<double>& timesteps() const override { return timesteps_; }
  void skip(int64_t count) override { drop_first(timesteps_, count); }
  at::Tensor noised(const at::Tensor& x_0, const at::Tensor& noise) const override {
    return noised_at(tables().alpha_bar[row(0)], x_0, noise);
  }

 protected:
  // Returns the row of the tables for step i. Steps walk down.
  size_t row(int64_t i) const { return timesteps_.size() - 1 - static_cast<size_t>(i); }
  const IddpmTables& tables() const { return respaced_.tables; }

  at::Tensor epsilon(const at::Tensor& x, const at::Tensor& output) const {
    check_channels("iddpm", output, options_.learn_sigma ? 2 * x.size(1) : x.size(1),
                   options_.learn_sigma ? "learn_sigma is on" : "learn_sigma is off");
    return output.narrow(1, 0, x.size(1));
  }

  at::Tensor predict_x_0(size_t t, const at::Tensor& x, const at::Tensor& epsilon) const {
    const at::Tensor x_0 = tables().sqrt_recip[t] * x - tables().sqrt_recip_minus_one[t] * epsilon;
    return options_.clip_denoised ? x_0.clamp(-1, 1) : x_0;
  }

  IddpmOptions options_;

 private:
  Respaced respaced_;
  std::vector<double> timesteps_;
};

class IddpmSampler : public IddpmSamplerBase {
 public:
  using IddpmSamplerBase::IddpmSamplerBase;

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& output,
                  const StepNoiseFn& noise) override {
    const size_t t = row(i);
    const at::Tensor x_0 = predict_x_0(t, x, epsilon(x, output));
    at::Tensor mean = tables().mean_x_0[t] * x_0 + tables().mean_x_t[t] * x;
    if (t == 0) return mean;
    if (!options_.learn_sigma) return mean + std::exp(0.5 * fixed_log_variance(t)) * noise(i);
    const at::Tensor fraction = (output.narrow(1, x.size(1), x.size(1)) + 1) / 2;
    const at::Tensor log_variance =
        fraction * tables().log_beta[t] + (1 - fraction) * tables().posterior_log_variance[t];
    return mean + (0.5 * log_variance).exp() * noise(i);
  }
  bool stochastic() const override { return true; }

 private:
  double fixed_log_variance(size_t t) const {
    return options_.sigma_small ? tables().posterior_log_variance[t] : tables().log_beta[t];
  }
};

class IddpmDdimSampler : public IddpmSamplerBase {
 public:
  explicit IddpmDdimSampler(const JsonConfig& config)
      : IddpmSamplerBase(config), eta_(config.get("eta", 0.0)) {
    if (!(eta_ >= 0)) fail(config.who(), "expected eta to be 0 or more, got {}", eta_);
  }

  at::Tensor step(int64_t i, const at::Tensor& x, const at::Tensor& output,
                  const StepNoiseFn& noise) override {
    const size_t t = row(i);
    const at::Tensor x_0 = predict_x_0(t, x, epsilon(x, output));
    // Computed from x_0 again, so clipping counts (Song et al. 2021, eq. 12).
    const at::Tensor direction = (tables().sqrt_recip[t] * x - x_0) / tables().sqrt_recip_minus_one[t];
    const double bar = tables().alpha_bar[t], previous = tables().alpha_bar_prev[t];
    const double sigma = eta_ * std::sqrt((1 - previous) / (1 - bar)) * std::sqrt(1 - bar / previous);
    const at::Tensor mean =
        std::sqrt(previous) * x_0 + std::sqrt(std::max(1 - previous - sigma * sigma, 0.0)) * direction;
    return t == 0 || eta_ == 0 ? mean : mean + sigma * noise(i);
  }
  bool stochastic() const override { return eta_ > 0; }

 private:
  double eta_;
};

}  // namespace

std::vector<int64_t> respaced_timesteps(int64_t num_train_timesteps, const std::string& respacing) {
  if (respacing.empty()) return respaced_timesteps(num_train_timesteps, std::to_string(num_train_timesteps));
  if (respacing.starts_with("ddim")) {
    const int64_t wanted = parse_count(std::string_view(respacing).substr(4), respacing);
    for (int64_t stride = 1; stride < num_train_timesteps; ++stride) {
      if ((num_train_timesteps + stride - 1) / stride != wanted) continue;
      std::vector<int64_t> kept;
      for (int64_t t = 0; t < num_train_timesteps; t += stride) kept.push_back(t);
      return kept;
    }
    fail("iddpm", "no integer stride takes exactly {} of {} timesteps: choose another number of ddim's steps",
         wanted, num_train_timesteps);
  }
  std::vector<int64_t> counts;
  for (size_t begin = 0; begin <= respacing.size();) {
    const size_t end = std::min(respacing.find(',', begin), respacing.size());
    std::string_view part = std::string_view(respacing).substr(begin, end - begin);
    while (!part.empty() && part.front() == ' ') part.remove_prefix(1);
    while (!part.empty() && part.back() == ' ') part.remove_suffix(1);
    counts.push_back(parse_count(part, respacing));
    begin = end + 1;
  }
  const int64_t sections = static_cast<int64_t>(counts.size());
  std::set<int64_t> kept;
  int64_t start = 0;
  for (int64_t section = 0; section < sections; ++section) {
    const int64_t size = num_train_timesteps / sections + (section < num_train_timesteps % sections ? 1 : 0);
    const int64_t count = counts[section];
    if (count > size)
      fail("iddpm", "cannot take {} sampling steps from {} timesteps (steps \"{}\" of {})", count, size,
           respacing, num_train_timesteps);
    const double stride = count > 1 ? static_cast<double>(size - 1) / static_cast<double>(count - 1) : 1.0;
    double position = 0;  // published runs depend on sums (not products) rounded half to even
    for (int64_t i = 0; i < count; ++i, position += stride)
      kept.insert(start + static_cast<int64_t>(std::nearbyint(position)));
    start += size;
  }
  return {kept.begin(), kept.end()};
}

std::unique_ptr<Sampler> make_iddpm_sampler(const nlohmann::json& config) {
  return std::make_unique<IddpmSampler>(JsonConfig("iddpm", config));
}
std::unique_ptr<Sampler> make_iddpm_ddim_sampler(const nlohmann::json& config) {
  return std::make_unique<IddpmDdimSampler>(JsonConfig("iddpm_ddim", config));
}

}  // namespace kiln
