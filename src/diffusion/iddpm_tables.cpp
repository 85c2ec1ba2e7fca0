#include "diffusion/iddpm_tables.h"

#include <cmath>

#include "diffusion/schedule.h"

namespace kiln {

IddpmTables::IddpmTables(std::vector<double> given)
    : betas(std::move(given)), alpha_bar(cumulative_alphas(betas)) {
  const size_t size = betas.size();
  for (size_t t = 0; t < size; ++t) {
    const double bar = alpha_bar[t], previous = t == 0 ? 1.0 : alpha_bar[t - 1], beta = betas[t];
    alpha_bar_prev.push_back(previous);
    sqrt_alpha_bar.push_back(std::sqrt(bar));
    sqrt_one_minus_alpha_bar.push_back(std::sqrt(1 - bar));
    sqrt_recip.push_back(std::sqrt(1 / bar));
    sqrt_recip_minus_one.push_back(std::sqrt(1 / bar - 1));
    posterior_variance.push_back(beta * (1 - previous) / (1 - bar));
    log_beta.push_back(std::log(beta));
    mean_x_0.push_back(beta * std::sqrt(previous) / (1 - bar));
    mean_x_t.push_back((1 - previous) * std::sqrt(1 - beta) / (1 - bar));
  }
  for (size_t t = 0; t < size; ++t)
    posterior_log_variance.push_back(std::log(posterior_variance[t == 0 && size > 1 ? 1 : t]));
}

}  // namespace kiln
