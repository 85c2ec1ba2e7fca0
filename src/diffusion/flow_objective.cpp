#include "diffusion/flow_objective.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/losses.h"
#include "diffusion/objective_types.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

class FlowObjective : public Objective {
 public:
  explicit FlowObjective(const JsonConfig& config)
      : shift_(config.get("shift", 1.0)),
        num_train_timesteps_(config.positive("num_train_timesteps", 1000)),
        cosmap_(config.choice("weighting", "none", {"none", "cosmap"}) == "cosmap"),
        logit_normal_(config.choice("timestep_sampling", "uniform", {"uniform", "logit_normal"}) ==
                      "logit_normal"),
        logit_mean_(config.get("logit_mean", 0.0)),
        logit_std_(config.get("logit_std", 1.0)),
        contrastive_lambda_(config.get("contrastive_lambda", 0.0)) {
    if (!(shift_ > 0)) fail(config.who(), "expected shift to be positive, got {}", shift_);
    if (!(logit_std_ > 0)) fail(config.who(), "expected logit_std to be positive, got {}", logit_std_);
    // From 1 on, the loss has no least value.
    if (!(contrastive_lambda_ >= 0 && contrastive_lambda_ < 1))
      fail(config.who(), "expected contrastive_lambda from 0 to below 1, got {}", contrastive_lambda_);
    const std::string mode = config.choice("mode", "continuous", {"sana", "diffusers", "continuous"});
    if (mode == "continuous") return;
    const FlowTable table = mode == "sana" ? sana_flow_table(num_train_timesteps_, shift_)
                                           : diffusers_flow_table(num_train_timesteps_, shift_);
    sigmas_.emplace(table.sigmas);
    model_t_.emplace(table.model_t);
  }

  at::Tensor timesteps(const at::Tensor& u) const override {
    // With the inverse CDF, a logit-normal needs one uniform per image like every other density.
    const at::Tensor t = logit_normal_ ? (at::special_ndtri(u) * logit_std_ + logit_mean_).sigmoid() : u;
    if (sigmas_) return uniform_index(t, num_train_timesteps_);
    return (shift_ * t / (1 + (shift_ - 1) * t)).to(at::kFloat);
  }

  NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                        const at::Tensor& timesteps) const override {
    const at::Tensor sigma = position(timesteps);
    const at::Tensor level = sigma.view({-1, 1, 1, 1});
    NoisedBatch noised;
    noised.x_t = (1 - level) * x_0 + level * noise;
    noised.model_t =
        model_t_ ? model_t_->gather(timesteps) : sigma * static_cast<double>(num_train_timesteps_);
    noised.target = noise - x_0;
    noised.timesteps = timesteps;
    return noised;
  }

  std::vector<std::string> term_names() const override {
    if (compares_samples()) return {"mse", "contrastive"};
    return {"mse"};
  }

  LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                 const NoisedBatch& noised) const override {
    const auto mse_to = [&](const at::Tensor& target) {
      return mean_per_image((predicted_channels("flow", prediction, x_0.size(1)) - target).square());
    };
    LossTerms found{.loss = mse_to(noised.target)};
    found.terms = {found.loss};
    if (compares_samples() && noised.other_target.defined()) {  // contrastive: Stoica et al. 2025
      found.terms.push_back(mse_to(noised.other_target));
      found.loss = found.loss - contrastive_lambda_ * found.terms.back();
    }
    if (cosmap_) {  // Esser et al. 2024, sec. 3.1
      const at::Tensor sigma = position(noised.timesteps);
      found.loss = found.loss * (2 / std::numbers::pi) / (1 - 2 * sigma + 2 * sigma.square());
    }
    return found;
  }

  // sigma itself runs from 0 (clean) to 1.
  at::Tensor position(const at::Tensor& timesteps) const override {
    return sigmas_ ? sigmas_->gather(timesteps) : timesteps.to(at::kFloat);
  }
  bool learns_sigma() const override { return false; }
  bool compares_samples() const override { return contrastive_lambda_ > 0; }

 private:
  double shift_;
  int64_t num_train_timesteps_;
  bool cosmap_, logit_normal_;
  double logit_mean_, logit_std_, contrastive_lambda_;
  std::optional<Table> sigmas_, model_t_;  // by index; absent if timesteps are sigmas
};

}  // namespace

FlowTable sana_flow_table(int64_t num_train_timesteps, double shift) {
  // Sana takes one minus a linear ramp from 1 to 1/1000. The sums here round the same way. Otherwise the
  // truncation below would fall to the other side at sigmas that are whole timesteps.
  const double scale = 1000.0 / static_cast<double>(num_train_timesteps);
  const double start = scale * 1.0, end = scale * 0.001;
  const double stride = (end - start) / static_cast<double>(std::max<int64_t>(num_train_timesteps - 1, 1));
  FlowTable table;
  for (int64_t i = 0; i < num_train_timesteps; ++i) {
    const bool last = i + 1 == num_train_timesteps && i > 0;
    const double ramp = last ? end : static_cast<double>(i) * stride + start;
    const double sigma = shift_sigma(1.0 - ramp, shift);
    table.sigmas.push_back(sigma);
    table.model_t.push_back(std::trunc(sigma * static_cast<double>(num_train_timesteps)));
  }
  return table;
}

FlowTable diffusers_flow_table(int64_t num_train_timesteps, double shift) {
  const float steps = static_cast<float>(num_train_timesteps);
  const float factor = static_cast<float>(shift), excess = static_cast<float>(shift - 1);
  FlowTable table;
  for (int64_t i = num_train_timesteps; i > 0; --i) {
    const float plain = static_cast<float>(i) / steps;
    const float sigma = factor * plain / (1.0f + excess * plain);
    table.sigmas.push_back(sigma);
    table.model_t.push_back(sigma * steps);
  }
  return table;
}

std::unique_ptr<Objective> make_flow_objective(const nlohmann::json& config) {
  return std::make_unique<FlowObjective>(JsonConfig("flow", config));
}

}  // namespace kiln
