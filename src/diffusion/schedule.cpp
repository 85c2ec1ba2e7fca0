#include "diffusion/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "core/aten.h"
#include "core/error.h"

namespace kiln {

Table::Table(const std::vector<double>& values) : copies_(std::make_shared<Copies>()) {
  copies_->tensors.push_back(at::tensor(values, at::kDouble).to(at::kFloat));
}

at::Tensor Table::gather(const at::Tensor& timesteps) const {
  at::Tensor table;
  {
    std::lock_guard lock(copies_->mutex);
    for (const at::Tensor& copy : copies_->tensors)
      if (copy.device() == timesteps.device()) table = copy;
    if (!table.defined()) {
      table = copies_->tensors.front().to(timesteps.device());
      copies_->tensors.push_back(table);
    }
  }
  return table.gather(0, timesteps);
}

at::Tensor Table::gather_image(const at::Tensor& timesteps) const {
  return gather(timesteps).view({-1, 1, 1, 1});
}

namespace {

// Returns betas whose running product follows alpha_bar(t), t in [0, 1] (Nichol & Dhariwal 2021).
std::vector<double> cosine_betas(int64_t num_train_timesteps) {
  const auto alpha_bar = [](double t) {
    const double cosine = std::cos((t + 0.008) / 1.008 * std::numbers::pi / 2);
    return cosine * cosine;
  };
  std::vector<double> betas(num_train_timesteps);
  const double steps = static_cast<double>(num_train_timesteps);
  for (int64_t i = 0; i < num_train_timesteps; ++i)
    betas[i] = std::min(1 - alpha_bar((i + 1) / steps) / alpha_bar(i / steps), 0.999);
  return betas;
}

// Lin et al. 2023, algorithm 1, in f32.
at::Tensor rescale_to_zero_terminal_snr(const at::Tensor& betas) {
  at::Tensor root = (1.0 - betas).cumprod(0).sqrt();
  const at::Tensor first = root[0].clone(), last = root[-1].clone();
  root = (root - last) * (first / (first - last));
  const at::Tensor alpha_bar = root.square();
  const at::Tensor alphas =
      at::cat({alpha_bar.slice(0, 0, 1), alpha_bar.slice(0, 1) / alpha_bar.slice(0, 0, -1)});
  return 1 - alphas;
}

at::Tensor diffusers_betas(const JsonConfig& config) {
  const int64_t steps = config.positive("num_train_timesteps", 1000);
  const double start = config.get("beta_start", 0.0001), end = config.get("beta_end", 0.02);
  if (config.has("trained_betas")) {
    const auto betas = config.require<std::vector<double>>("trained_betas");
    if (static_cast<int64_t>(betas.size()) != steps)
      fail(config.who(), "expected {} trained_betas, got {}", steps, betas.size());
    return at::tensor(betas, at::kDouble).to(at::kFloat);
  }
  const std::string schedule =
      config.choice("beta_schedule", "linear", {"linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"});
  if (schedule == "linear") return at::linspace(start, end, steps, at::kFloat);
  if (schedule == "scaled_linear")
    return at::linspace(std::sqrt(start), std::sqrt(end), steps, at::kFloat).square();
  if (schedule == "sigmoid") return at::linspace(-6, 6, steps, at::kFloat).sigmoid() * (end - start) + start;
  return at::tensor(cosine_betas(steps), at::kDouble).to(at::kFloat);
}

}  // namespace

std::vector<double> iddpm_betas(const std::string& schedule, int64_t num_train_timesteps) {
  if (schedule == "squaredcos_cap_v2") return cosine_betas(num_train_timesteps);
  if (schedule != "linear")
    fail("iddpm", "expected beta_schedule to be one of linear, squaredcos_cap_v2, got \"{}\"", schedule);
  const double scale = 1000.0 / static_cast<double>(num_train_timesteps);
  const double start = scale * 0.0001, end = scale * 0.02;
  // Short schedules would get betas of 1 and more, whose logarithms are not numbers.
  if (end >= 1)
    fail("iddpm", "expected num_train_timesteps above 20 with linear betas, got {}", num_train_timesteps);
  std::vector<double> betas(num_train_timesteps);
  const double stride = (end - start) / static_cast<double>(num_train_timesteps - 1);
  for (int64_t i = 0; i < num_train_timesteps; ++i) betas[i] = static_cast<double>(i) * stride + start;
  betas.back() = end;
  return betas;
}

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

std::vector<double> cumulative_alphas(const std::vector<double>& betas) {
  std::vector<double> alpha_bars;
  alpha_bars.reserve(betas.size());
  double product = 1;
  for (double beta : betas) alpha_bars.push_back(product *= 1 - beta);
  return alpha_bars;
}

std::vector<double> diffusers_alpha_bars(const JsonConfig& config) {
  at::Tensor betas = diffusers_betas(config);
  if (config.get("rescale_betas_zero_snr", false)) betas = rescale_to_zero_terminal_snr(betas);
  const at::Tensor alpha_bars = (1.0 - betas).cumprod(0).to(at::kDouble).contiguous();
  const double* data = alpha_bars.const_data_ptr<double>();
  return {data, data + alpha_bars.numel()};
}

double shift_sigma(double sigma, double shift) { return shift * sigma / (1 + (shift - 1) * sigma); }

}  // namespace kiln
