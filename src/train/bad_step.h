// Which samples made a step's loss or gradient not finite.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/json.h"
#include "data/store/sample_order.h"
#include "step/step_result.h"

namespace kiln {

class Objective;

// A sample of the global batch, by its id in the data.
struct BatchSample {
  int64_t id = 0;
  double timestep = 0;  // as the objective draws it
};

// Returns the samples at `count` positions of the run's stream of samples, from `first` on.
std::vector<BatchSample> samples_at(const Objective& objective, uint64_t seed, const SampleOrder& order,
                                    int64_t first, int64_t count);

struct BadStepReport {
  nlohmann::json event;  // for the log: cause ("loss" or "gradient"), sample_ids, timesteps
  std::string text;      // one line for people
};

// Reports the samples whose own loss is not finite, or the whole batch if only the gradient is not finite.
// `samples` has one entry per entry of result.losses. sample_name returns the name of an id.
BadStepReport bad_step_report(int64_t step, const StepResult& result, const std::vector<BatchSample>& samples,
                              const std::function<std::string(int64_t)>& sample_name);

}  // namespace kiln
