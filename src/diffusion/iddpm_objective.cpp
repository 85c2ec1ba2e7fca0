#include "diffusion/iddpm_objective.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

#include "diffusion/iddpm_tables.h"
#include "diffusion/losses.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

// Log-likelihood of x (-1..1 in 256 levels) under a discretised Gaussian whose mean is x - difference: the
// mass of the half-bins of width 1/255 around x, the outermost bins reaching to infinity. The normal CDF is
// the tanh approximation that the published models were trained with.
at::Tensor discretized_log_likelihood(const at::Tensor& x, const at::Tensor& difference,
                                      const at::Tensor& log_scale) {
  constexpr double kHalfBin = 1.0 / 255, kTiny = 1e-12, kEdge = 0.999;
  const auto cdf = [](const at::Tensor& z) {
    const double root = std::sqrt(2 / std::numbers::pi);
    return 0.5 * (1 + (root * (z + 0.044715 * z.pow(3))).tanh());
  };
  const at::Tensor inverse_scale = (-log_scale).exp();
  const at::Tensor upper = cdf(inverse_scale * (difference + kHalfBin));
  const at::Tensor lower = cdf(inverse_scale * (difference - kHalfBin));
  return at::where(
      x < -kEdge, upper.clamp_min(kTiny).log(),
      at::where(x > kEdge, (1 - lower).clamp_min(kTiny).log(), (upper - lower).clamp_min(kTiny).log()));
}

class IddpmObjective : public Objective {
 public:
  explicit IddpmObjective(const DiffusionConfig& config)
      : num_train_timesteps_(config.positive("num_train_timesteps", 1000)),
        learn_sigma_(config.get("learn_sigma", true)),
        vb_scale_(config.get("rescale_learned_sigmas", false) ? num_train_timesteps_ / 1000.0 : 1.0) {
    const IddpmTables tables(
        iddpm_betas(config.get<std::string>("beta_schedule", "linear"), num_train_timesteps_));
    signal_ = Table(tables.sqrt_alpha_bar);
    noise_level_ = Table(tables.sqrt_one_minus_alpha_bar);
    min_log_variance_ = Table(tables.posterior_log_variance);
    max_log_variance_ = Table(tables.log_beta);
    // x_0 - predicted x_0 = sqrt(1/alpha_bar - 1) * (epsilon - noise), and posterior means differ by
    // coefficient x_0.
    std::vector<double> error_scale(tables.betas.size());
    for (size_t t = 0; t < error_scale.size(); ++t)
      error_scale[t] = tables.mean_x_0[t] * tables.sqrt_recip_minus_one[t];
    error_scale_ = Table(error_scale);
  }

  at::Tensor timesteps(const at::Tensor& u) const override { return uniform_index(u, num_train_timesteps_); }

  NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                        const at::Tensor& timesteps) const override {
    NoisedBatch noised;
    noised.x_t = signal_.gather_image(timesteps) * x_0 + noise_level_.gather_image(timesteps) * noise;
    noised.model_t = timesteps.to(at::kFloat);
    noised.target = noise;
    noised.timesteps = timesteps;
    return noised;
  }

  LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                 const NoisedBatch& noised) const override {
    const int64_t channels = x_0.size(1);
    check_channels("iddpm", prediction, learn_sigma_ ? 2 * channels : channels,
                   learn_sigma_ ? "learn_sigma is on" : "learn_sigma is off");
    const at::Tensor output = prediction.to(at::kFloat);
    const at::Tensor epsilon = output.narrow(1, 0, channels);
    LossTerms terms;
    terms.mse = mean_per_image((epsilon - noised.target).square());
    if (!learn_sigma_) {
      terms.loss = terms.mse;
      return terms;
    }
    terms.vb = variational_bound(epsilon.detach(), output.narrow(1, channels, channels), x_0, noise,
                                 noised.timesteps);
    terms.loss = terms.mse + terms.vb;
    return terms;
  }

  at::Tensor position(const at::Tensor& timesteps) const override {
    return timesteps.to(at::kFloat) / static_cast<double>(num_train_timesteps_);
  }
  bool learns_sigma() const override { return learn_sigma_; }

 private:
  // Bits per dimension, (B): KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)), at t = 0 the negative
  // log-likelihood. The means are constants here: the bound trains the variance alone.
  at::Tensor variational_bound(const at::Tensor& epsilon, const at::Tensor& v, const at::Tensor& x_0,
                               const at::Tensor& noise, const at::Tensor& timesteps) const {
    const at::Tensor min_log = min_log_variance_.gather_image(timesteps);
    const at::Tensor max_log = max_log_variance_.gather_image(timesteps);
    const at::Tensor fraction = (v + 1) / 2;  // 0: posterior variance, 1: beta
    const at::Tensor log_variance = fraction * max_log + (1 - fraction) * min_log;
    // True mean minus predicted mean; at t = 0, where the posterior mean is x_0 itself, also x_0 minus the
    // mean.
    const at::Tensor difference = error_scale_.gather_image(timesteps) * (epsilon - noise);
    const at::Tensor kl = 0.5 * (log_variance - min_log - 1 + (min_log - log_variance).exp() +
                                 difference.square() * (-log_variance).exp());
    const at::Tensor log_likelihood = discretized_log_likelihood(x_0, difference, 0.5 * log_variance);
    const double bits = vb_scale_ / std::numbers::ln2;
    return at::where(timesteps == 0, mean_per_image(log_likelihood) * -bits, mean_per_image(kl) * bits);
  }

  int64_t num_train_timesteps_;
  bool learn_sigma_;
  double vb_scale_;
  Table signal_, noise_level_, min_log_variance_, max_log_variance_, error_scale_;
};

}  // namespace

std::unique_ptr<Objective> make_iddpm_objective(const nlohmann::json& config) {
  return std::make_unique<IddpmObjective>(DiffusionConfig("iddpm", config));
}

}  // namespace kiln
