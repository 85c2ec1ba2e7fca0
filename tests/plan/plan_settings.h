// Options of plans, for tests.
#pragma once
#include "plan/run/make_plan.h"
#include "train/settings.h"

namespace kiln::test {

// On so many of a GPU, with some options of training by name.
inline PlanOptions plan_options(const std::string& gpu, int64_t gpus, const nlohmann::json& settings) {
  PlanOptions options;
  options.gpu = gpu;
  options.gpus = gpus;
  options.train = changed(options.train, settings);
  return options;
}

// A run of one rank that has what one of several would have of each step.
inline TrainOptions rank_alone(const PlanOptions& options) {
  TrainOptions train = options.train;
  train.global_batch /= options.gpus;
  return train;
}

}  // namespace kiln::test
