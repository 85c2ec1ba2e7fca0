#include "diffusion/samplers/spacing.h"
#include "core/error.h"

#include <algorithm>
#include <cmath>

namespace kiln {
namespace {

// Returns numpy.arange(start, 0, -stride). Later elements are multiples of the rounded first difference,
// which decides how timesteps on a half round.
std::vector<double> descending_range(double start, double stride, int64_t at_most) {
  const int64_t count = std::min(static_cast<int64_t>(std::ceil(start / stride)), at_most);
  const double difference = (start - stride) - start;
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(start + static_cast<double>(i) * difference);
  return values;
}

std::vector<int64_t> trailing_timesteps(int64_t end, double stride, int64_t count) {
  std::vector<int64_t> timesteps;
  for (double value : descending_range(static_cast<double>(end), stride, count))
    timesteps.push_back(static_cast<int64_t>(std::nearbyint(value)) - 1);
  return timesteps;
}

// Returns linspace or leading timesteps, descending.
std::vector<int64_t> even_timesteps(const JsonConfig& scheduler, const std::string& spacing, int64_t end,
                                    int64_t count) {
  std::vector<int64_t> timesteps;
  if (spacing == "linspace") {
    for (double value : linspace(0, static_cast<double>(end - 1), count))
      timesteps.push_back(static_cast<int64_t>(std::nearbyint(value)));
  } else {
    const int64_t offset = scheduler.get<int64_t>("steps_offset", 0);
    for (int64_t i = 0; i < count; ++i) timesteps.push_back(i * (end / count) + offset);
  }
  std::reverse(timesteps.begin(), timesteps.end());
  return timesteps;
}

void check_range(const JsonConfig& scheduler, const std::vector<int64_t>& timesteps,
                 int64_t num_train_timesteps) {
  for (int64_t t : timesteps)
    if (t < 0 || t >= num_train_timesteps)
      fail(scheduler.who(),
           "timestep {} is outside the {} timesteps of training: lower steps_offset or the number of steps",
           t, num_train_timesteps);
}

}  // namespace

std::vector<double> linspace(double start, double stop, int64_t count) {
  std::vector<double> values(count, start);
  if (count == 1) return values;
  const double stride = (stop - start) / static_cast<double>(count - 1);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<double>(i) * stride + start;
  values.back() = stop;
  return values;
}

std::vector<int64_t> spaced_timesteps(const JsonConfig& scheduler, int64_t num_sampling_steps,
                                      const std::string& default_spacing) {
  const int64_t end = scheduler.positive("num_train_timesteps", 1000);
  const std::string spacing =
      scheduler.choice("timestep_spacing", default_spacing, {"linspace", "leading", "trailing"});
  std::vector<int64_t> timesteps =
      spacing == "trailing"
          ? trailing_timesteps(end, static_cast<double>(end) / static_cast<double>(num_sampling_steps),
                               num_sampling_steps)
          : even_timesteps(scheduler, spacing, end, num_sampling_steps);
  check_range(scheduler, timesteps, end);
  return timesteps;
}

std::vector<int64_t> spaced_solver_timesteps(const JsonConfig& scheduler, int64_t num_sampling_steps,
                                             int64_t end) {
  const int64_t num_train_timesteps = scheduler.positive("num_train_timesteps", 1000);
  const std::string spacing =
      scheduler.choice("timestep_spacing", "linspace", {"linspace", "leading", "trailing"});
  std::vector<int64_t> timesteps;
  if (spacing == "trailing") {
    const double stride = static_cast<double>(num_train_timesteps) / static_cast<double>(num_sampling_steps);
    timesteps = trailing_timesteps(end, stride, num_sampling_steps);
  } else {
    timesteps = even_timesteps(scheduler, spacing, end, num_sampling_steps + 1);
    timesteps.pop_back();
  }
  check_range(scheduler, timesteps, num_train_timesteps);
  return timesteps;
}

std::vector<double> karras_sigmas(double sigma_max, double sigma_min, int64_t count) {
  constexpr double kRho = 7;
  const double high = std::pow(sigma_max, 1 / kRho), low = std::pow(sigma_min, 1 / kRho);
  std::vector<double> sigmas;
  for (double ramp : linspace(0, 1, count)) sigmas.push_back(std::pow(high + ramp * (low - high), kRho));
  return sigmas;
}

std::vector<double> exponential_sigmas(double sigma_max, double sigma_min, int64_t count) {
  std::vector<double> sigmas;
  for (double level : linspace(std::log(sigma_max), std::log(sigma_min), count))
    sigmas.push_back(std::exp(level));
  return sigmas;
}

double timestep_of_sigma(double sigma, const std::vector<float>& log_sigmas) {
  const double log_sigma = std::log(std::max(sigma, 1e-10));
  size_t low = 0;
  while (low + 2 < log_sigmas.size() && log_sigma >= log_sigmas[low + 1]) ++low;
  const double left = log_sigmas[low], right = log_sigmas[low + 1];
  const double fraction = std::clamp((left - log_sigma) / (left - right), 0.0, 1.0);
  return (1 - fraction) * static_cast<double>(low) + fraction * static_cast<double>(low + 1);
}

int64_t num_steps(const JsonConfig& config, int64_t most) {
  if (!config.has("steps")) fail(config.who(), "expected \"steps\" in the sampler's config");
  const int64_t steps = config.positive("steps", 0);
  if (steps > most)
    fail(config.who(), "expected at most {} sampling steps (the training timesteps), got {}", most, steps);
  return steps;
}

}  // namespace kiln
