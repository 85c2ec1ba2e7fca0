// Spaces the timesteps and noise levels of samplers as diffusers' schedulers do, rounding included.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/json_config.h"

namespace kiln {

// Returns `count` values from start to stop, both included, rounded like numpy.linspace.
std::vector<double> linspace(double start, double stop, int64_t count);

// Returns descending timesteps by "timestep_spacing" (linspace | leading | trailing) and "steps_offset", as
// the schedulers of DDIM and DDPM choose them. `default_spacing`: the scheduler's default.
std::vector<int64_t> spaced_timesteps(const JsonConfig& scheduler, int64_t num_sampling_steps,
                                      const std::string& default_spacing);
// Returns the timesteps of DPM-Solver, spaced over [0, end). Its linspace and leading spacings leave out one
// more.
std::vector<int64_t> spaced_solver_timesteps(const JsonConfig& scheduler, int64_t num_sampling_steps,
                                             int64_t end);

// Return descending noise levels: by Karras et al. 2022, eq. 5 with rho 7, or with evenly spaced logarithms.
std::vector<double> karras_sigmas(double sigma_max, double sigma_min, int64_t count);
std::vector<double> exponential_sigmas(double sigma_max, double sigma_min, int64_t count);

// Returns the fractional training timestep of a noise level by interpolating log(sigma). `log_sigmas`: those
// of the training timesteps, ascending.
double timestep_of_sigma(double sigma, const std::vector<float>& log_sigmas);

// Drops the first `count` of the values that a sampler keeps per step.
template <class T>
void drop_first(std::vector<T>& values, int64_t count) {
  values.erase(values.begin(), values.begin() + count);
}

// Returns "steps" of a sampler config, at least 1 and at most `most`. Throws Error.
int64_t num_steps(const JsonConfig& config, int64_t most);

}  // namespace kiln
