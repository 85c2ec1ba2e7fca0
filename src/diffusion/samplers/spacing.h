// Where samplers put their steps: timesteps and noise levels as diffusers' schedulers space them, rounding
// included.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/json_config.h"

namespace kiln {

// `count` values from start to stop, both included, rounded as numpy.linspace rounds.
std::vector<double> linspace(double start, double stop, int64_t count);

// Descending timesteps below `end` by "timestep_spacing" (linspace | leading | trailing), as DDIM's and
// DDPM's schedulers choose them, "steps_offset" included. `default_spacing` is the scheduler's.
std::vector<int64_t> spaced_timesteps(const JsonConfig& scheduler, int64_t num_sampling_steps,
                                      const std::string& default_spacing);
// The same for DPM-Solver, whose linspace and leading spacings leave out one more timestep.
std::vector<int64_t> spaced_solver_timesteps(const JsonConfig& scheduler, int64_t num_sampling_steps,
                                             int64_t end);

// Descending noise levels: Karras et al. 2022, eq. 5 with rho 7; evenly spaced logarithms.
std::vector<double> karras_sigmas(double sigma_max, double sigma_min, int64_t count);
std::vector<double> exponential_sigmas(double sigma_max, double sigma_min, int64_t count);

// The fractional training timestep of a noise level, by interpolation of log(sigma). `log_sigmas`: of the
// training timesteps, ascending.
double timestep_of_sigma(double sigma, const std::vector<float>& log_sigmas);

// Leaves out the first of what a sampler keeps for each step.
template <class T>
void drop_first(std::vector<T>& values, int64_t count) {
  values.erase(values.begin(), values.begin() + count);
}

// "steps" of a sampler config, at least 1 and at most `most`.
int64_t num_steps(const JsonConfig& config, int64_t most);

}  // namespace kiln
