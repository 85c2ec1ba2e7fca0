// What IDDPM's objective and samplers derive from betas (Ho et al. 2020, eq. 4-7; Nichol & Dhariwal 2021).
#pragma once
#include <vector>

namespace kiln {

// Index t is the timestep; all f64.
struct IddpmTables {
  explicit IddpmTables(std::vector<double> betas);

  std::vector<double> betas, alpha_bar, alpha_bar_prev;
  std::vector<double> sqrt_alpha_bar, sqrt_one_minus_alpha_bar;
  std::vector<double> sqrt_recip,
      sqrt_recip_minus_one;  // x_0 = sqrt_recip x_t - sqrt_recip_minus_one epsilon
  std::vector<double> posterior_variance;
  std::vector<double> posterior_log_variance;  // at t = 0, where the variance is 0, the value of t = 1
  std::vector<double> log_beta;
  std::vector<double> mean_x_0, mean_x_t;  // posterior mean = mean_x_0 x_0 + mean_x_t x_t
};

}  // namespace kiln
