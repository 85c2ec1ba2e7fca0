// Noise schedules as tables over the training timesteps, computed in f64 on the host.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/json_config.h"

namespace kiln {

// One coefficient per training timestep. Computed in f64 and gathered as f32 on the timesteps' device,
// without a host synchronisation. The table itself is copied to each device once.
class Table {
 public:
  Table() = default;
  explicit Table(const std::vector<double>& values);
  // timesteps (B) i64 -> (B) f32.
  at::Tensor gather(const at::Tensor& timesteps) const;
  // The same, shaped (B, 1, 1, 1) for broadcasting over images.
  at::Tensor gather_image(const at::Tensor& timesteps) const;

 private:
  struct Copies {
    std::mutex mutex;
    std::vector<at::Tensor> tensors;  // one per device used so far
  };
  std::shared_ptr<Copies> copies_;
};

// Returns IDDPM's betas in f64: "linear" (1e-4..0.02 scaled by 1000 / T, Ho et al. 2020) or
// "squaredcos_cap_v2" (Nichol & Dhariwal 2021, eq. 17, betas capped at 0.999). Throws Error for other names.
std::vector<double> iddpm_betas(const std::string& schedule, int64_t num_train_timesteps);

// Derived from betas for IDDPM's objective and samplers (Ho et al. 2020, eq. 4-7; Nichol & Dhariwal 2021).
// Index t is the timestep; all f64.
struct IddpmTables {
  explicit IddpmTables(std::vector<double> betas);

  std::vector<double> betas, alpha_bar, alpha_bar_prev;
  std::vector<double> sqrt_alpha_bar, sqrt_one_minus_alpha_bar;
  // x_0 = sqrt_recip x_t - sqrt_recip_minus_one epsilon
  std::vector<double> sqrt_recip, sqrt_recip_minus_one;
  std::vector<double> posterior_variance;
  std::vector<double> posterior_log_variance;  // at t = 0, where the variance is 0, the value of t = 1
  std::vector<double> log_beta;
  std::vector<double> mean_x_0, mean_x_t;  // posterior mean = mean_x_0 x_0 + mean_x_t x_t
};

// Returns the running product of (1 - beta).
std::vector<double> cumulative_alphas(const std::vector<double>& betas);

// Returns alpha_bar of a diffusers scheduler_config.json: num_train_timesteps, beta_start, beta_end,
// beta_schedule (linear | scaled_linear | squaredcos_cap_v2 | sigmoid), trained_betas,
// rescale_betas_zero_snr. Computes in f32 like diffusers, because published models were trained on those very
// numbers, then widens to f64.
std::vector<double> diffusers_alpha_bars(const JsonConfig& config);

// Returns shift * sigma / (1 + (shift - 1) * sigma) (Esser et al. 2024, eq. 23).
double shift_sigma(double sigma, double shift);

}  // namespace kiln
