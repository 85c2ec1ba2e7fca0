// Noise schedules as tables over the training timesteps, computed in f64 on the host.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/json_config.h"

namespace kiln {

// One coefficient per training timestep. Computed in f64, gathered as f32 on whatever device the timesteps
// are on, without a host synchronisation (the table itself is copied to each device once).
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

// IDDPM's "linear" (1e-4..0.02 scaled by 1000 / T, Ho et al. 2020) and "squaredcos_cap_v2" (Nichol & Dhariwal
// 2021, eq. 17, betas capped at 0.999), in f64. Throws Error for other names.
std::vector<double> iddpm_betas(const std::string& schedule, int64_t num_train_timesteps);

// Running product of (1 - beta).
std::vector<double> cumulative_alphas(const std::vector<double>& betas);

// alpha_bar of a diffusers scheduler_config.json: num_train_timesteps, beta_start, beta_end, beta_schedule
// (linear | scaled_linear | squaredcos_cap_v2 | sigmoid), trained_betas, rescale_betas_zero_snr. Built in f32
// as diffusers builds it, because published models were trained on those very numbers; returned widened.
std::vector<double> diffusers_alpha_bars(const JsonConfig& config);

// sigma -> shift * sigma / (1 + (shift - 1) * sigma) (Esser et al. 2024, eq. 23).
double shift_sigma(double sigma, double shift);

}  // namespace kiln
