#include <algorithm>
#include <cmath>

#include "core/aten.h"
#include "core/error.h"
#include "diffusion/losses.h"
#include "diffusion/objective_types.h"
#include "diffusion/schedule.h"

namespace kiln {
namespace {

enum class Prediction { kEpsilon, kV, kX0 };

// Returns the min-SNR-gamma loss weight of a timestep (Hang et al. 2023, sec. 3.4).
double min_snr_weight(double alpha_bar, double gamma, Prediction prediction) {
  const double snr = alpha_bar / (1 - alpha_bar), clipped = std::min(snr, gamma);
  switch (prediction) {
    case Prediction::kEpsilon:
      return snr > 0 ? clipped / snr : 1.0;  // the limit at zero terminal SNR
    case Prediction::kV:
      return clipped / (snr + 1);
    case Prediction::kX0:
      return clipped;
  }
  return 1;
}

class DdpmObjective : public Objective {
 public:
  explicit DdpmObjective(const JsonConfig& config) {
    const std::vector<double> alpha_bars = diffusers_alpha_bars(config);
    num_train_timesteps_ = static_cast<int64_t>(alpha_bars.size());
    const std::string name =
        config.choice("prediction_type", "epsilon", {"epsilon", "v_prediction", "sample"});
    prediction_ = name == "epsilon"  ? Prediction::kEpsilon
                  : name == "sample" ? Prediction::kX0
                                     : Prediction::kV;
    weighted_ = config.has("snr_gamma");
    const double gamma = config.get("snr_gamma", 5.0);
    if (!(gamma > 0)) fail(config.who(), "expected snr_gamma to be positive, got {}", gamma);
    std::vector<double> signal, noise_level, weight;
    for (double alpha_bar : alpha_bars) {
      signal.push_back(std::sqrt(alpha_bar));
      noise_level.push_back(std::sqrt(1 - alpha_bar));
      weight.push_back(min_snr_weight(alpha_bar, gamma, prediction_));
    }
    signal_ = Table(signal);
    noise_level_ = Table(noise_level);
    weight_ = Table(weight);
  }

  at::Tensor timesteps(const at::Tensor& u) const override { return uniform_index(u, num_train_timesteps_); }

  NoisedBatch add_noise(const at::Tensor& x_0, const at::Tensor& noise,
                        const at::Tensor& timesteps) const override {
    const at::Tensor alpha_t = signal_.gather_image(timesteps),
                     sigma_t = noise_level_.gather_image(timesteps);
    NoisedBatch noised;
    noised.x_t = alpha_t * x_0 + sigma_t * noise;
    noised.model_t = timesteps.to(at::kFloat);
    noised.target = prediction_ == Prediction::kEpsilon ? noise
                    : prediction_ == Prediction::kX0    ? x_0
                                                        : alpha_t * noise - sigma_t * x_0;
    noised.timesteps = timesteps;
    return noised;
  }

  std::vector<std::string> term_names() const override { return {"mse"}; }

  LossTerms loss(const at::Tensor& prediction, const at::Tensor& x_0, const at::Tensor& noise,
                 const NoisedBatch& noised) const override {
    const at::Tensor mse =
        mean_per_image((predicted_channels("ddpm", prediction, x_0.size(1)) - noised.target).square());
    return {.loss = weighted_ ? mse * weight_.gather(noised.timesteps) : mse, .terms = {mse}};
  }

  at::Tensor position(const at::Tensor& timesteps) const override {
    return timesteps.to(at::kFloat) / static_cast<double>(num_train_timesteps_);
  }
  bool learns_sigma() const override { return false; }

 private:
  int64_t num_train_timesteps_ = 0;
  Prediction prediction_ = Prediction::kEpsilon;
  bool weighted_ = false;
  Table signal_, noise_level_, weight_;
};

}  // namespace

std::unique_ptr<Objective> make_ddpm_objective(const nlohmann::json& config) {
  return std::make_unique<DdpmObjective>(JsonConfig("ddpm", config));
}

}  // namespace kiln
