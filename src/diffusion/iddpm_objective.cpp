#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <numbers>

#include "core/aten.h"
#include "diffusion/losses.h"
#include "diffusion/objective_types.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

// A value per pixel and its derivative by the log-variance.
struct Differentiated {
  at::Tensor value, slope;
};

// Returns KL(q(x_{t-1} | x_t, x_0) || p(x_{t-1} | x_t)) of two Gaussians whose means differ by `difference`.
Differentiated kl_divergence(const at::Tensor& difference, const at::Tensor& true_log_variance,
                             const at::Tensor& log_variance) {
  const at::Tensor gap = log_variance - true_log_variance;
  const at::Tensor excess = (-gap).exp() + difference.square() * (-log_variance).exp();
  return {0.5 * (gap - 1 + excess), 0.5 * (1 - excess)};
}

// Returns the negative log-likelihood of x (-1..1 in 256 levels) under a discretised Gaussian whose mean is
// x - difference: the mass of the half-bins of width 1/255 around x. The outermost bins reach to infinity.
// The normal CDF is the tanh approximation that the published models were trained with.
Differentiated discretized_likelihood(const at::Tensor& x, const at::Tensor& difference,
                                      const at::Tensor& log_variance) {
  constexpr double kHalfBin = 1.0 / 255, kTiny = 1e-12, kEdge = 0.999, kCubic = 0.044715;
  const double root = std::sqrt(2 / std::numbers::pi);
  struct Bound {
    at::Tensor cdf, slope;  // slope by the log-variance: z is proportional to exp(-log_variance / 2)
  };
  const at::Tensor inverse_scale = (-0.5 * log_variance).exp();
  const auto bound = [&](double offset) -> Bound {
    const at::Tensor z = inverse_scale * (difference + offset);
    const at::Tensor tanh = (root * (z + kCubic * z.pow(3))).tanh();
    return {0.5 * (1 + tanh), -0.25 * root * (1 - tanh.square()) * (z + 3 * kCubic * z.pow(3))};
  };
  const Bound upper = bound(kHalfBin), lower = bound(-kHalfBin);
  const at::Tensor below_top = (x <= kEdge).to(at::kFloat), above_bottom = (x >= -kEdge).to(at::kFloat);
  const at::Tensor mass = upper.cdf * below_top + (1 - below_top) - lower.cdf * above_bottom;
  const at::Tensor clamped = mass.clamp_min(kTiny);
  const at::Tensor mass_slope = upper.slope * below_top - lower.slope * above_bottom;
  return {-clamped.log(), -mass_slope / clamped * (mass >= kTiny).to(at::kFloat)};
}

// Returns nats, (B): the likelihood at t = 0, the divergence elsewhere. Only the log-variance (B, C, H, W)
// has a gradient, so only its slope is saved.
struct VariationalBound : torch::autograd::Function<VariationalBound> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& log_variance,
                            const at::Tensor& true_log_variance, const at::Tensor& difference,
                            const at::Tensor& x_0, const at::Tensor& is_first) {
    const Differentiated kl = kl_divergence(difference, true_log_variance, log_variance);
    const Differentiated likelihood = discretized_likelihood(x_0, difference, log_variance);
    const at::Tensor row =
        is_first.to(at::kLong).view({-1, 1, 1, 1, 1}).expand({-1, 1, x_0.size(1), x_0.size(2), x_0.size(3)});
    const auto choose = [&](const at::Tensor& elsewhere, const at::Tensor& first) {
      return at::stack({elsewhere, first}, 1).gather(1, row).squeeze(1);
    };
    ctx->save_for_backward({choose(kl.slope, likelihood.slope) / static_cast<double>(x_0[0].numel())});
    return mean_per_image(choose(kl.value, likelihood.value));
  }

  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
                                               const torch::autograd::tensor_list& grads) {
    return {ctx->get_saved_variables()[0] * grads[0].view({-1, 1, 1, 1}), {}, {}, {}, {}};
  }
};

class IddpmObjective : public Objective {
 public:
  explicit IddpmObjective(const JsonConfig& config)
      : num_train_timesteps_(config.positive("num_train_timesteps", 1000)),
        learn_sigma_(config.get("learn_sigma", true)),
        vb_scale_(config.get("rescale_learned_sigmas", false) ? num_train_timesteps_ / 1000.0 : 1.0) {
    const IddpmTables tables(
        iddpm_betas(config.get<std::string>("beta_schedule", "linear"), num_train_timesteps_));
    signal_ = Table(tables.sqrt_alpha_bar);
    noise_level_ = Table(tables.sqrt_one_minus_alpha_bar);
    min_log_variance_ = Table(tables.posterior_log_variance);
    max_log_variance_ = Table(tables.log_beta);
    // x_0 - predicted x_0 = sqrt(1/alpha_bar - 1) * (epsilon - noise). The posterior means differ by mean_x_0
    // times that.
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

  std::vector<std::string> term_names() const override {
    if (learn_sigma_) return {"mse", "vb"};
    return {"mse"};
  }

  LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                 const NoisedBatch& noised) const override {
    const int64_t channels = x_0.size(1);
    check_channels("iddpm", prediction, learn_sigma_ ? 2 * channels : channels,
                   learn_sigma_ ? "learn_sigma is on" : "learn_sigma is off");
    const at::Tensor output = prediction.to(at::kFloat);
    const at::Tensor epsilon = output.narrow(1, 0, channels);
    const at::Tensor mse = mean_per_image((epsilon - noised.target).square());
    if (!learn_sigma_) return {.loss = mse, .terms = {mse}};
    const at::Tensor vb = variational_bound(epsilon.detach(), output.narrow(1, channels, channels), x_0,
                                            noise, noised.timesteps);
    return {.loss = mse + vb, .terms = {mse, vb}};
  }

  at::Tensor position(const at::Tensor& timesteps) const override {
    return timesteps.to(at::kFloat) / static_cast<double>(num_train_timesteps_);
  }
  bool learns_sigma() const override { return learn_sigma_; }

 private:
  // Returns bits per dimension, (B). The means are constants here: the bound trains only the variance.
  at::Tensor variational_bound(const at::Tensor& epsilon, const at::Tensor& v, const at::Tensor& x_0,
                               const at::Tensor& noise, const at::Tensor& timesteps) const {
    const at::Tensor min_log = min_log_variance_.gather_image(timesteps);
    const at::Tensor max_log = max_log_variance_.gather_image(timesteps);
    const at::Tensor fraction = (v + 1) / 2;  // 0: posterior variance, 1: beta
    const at::Tensor log_variance = fraction * max_log + (1 - fraction) * min_log;
    // The true mean minus the predicted mean. At t = 0 the posterior mean is x_0, so this is also x_0 minus
    // the predicted mean.
    const at::Tensor difference = error_scale_.gather_image(timesteps) * (epsilon - noise);
    return VariationalBound::apply(log_variance, min_log, difference, x_0, timesteps == 0) *
           (vb_scale_ / std::numbers::ln2);
  }

  int64_t num_train_timesteps_;
  bool learn_sigma_;
  double vb_scale_;
  Table signal_, noise_level_, min_log_variance_, max_log_variance_, error_scale_;
};

}  // namespace

std::unique_ptr<Objective> make_iddpm_objective(const nlohmann::json& config) {
  return std::make_unique<IddpmObjective>(JsonConfig("iddpm", config));
}

}  // namespace kiln
