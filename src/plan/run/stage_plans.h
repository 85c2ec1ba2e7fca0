// The plans of a run's stages. The run needs the memory of the worst one and the time of all.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "plan/run/plan.h"

namespace kiln {

struct StagePlans {
  std::vector<std::string> names;  // "stage 2 (large)"
  std::vector<Plan> plans;         // each stage alone, with its own steps
  size_t worst = 0;                // the one that needs the most memory
  int64_t steps = 0;
  double days = 0, cost = 0;
  bool fits = true;  // all of them
};

// Plans each stage with `plan`. REQUIRES: options.train has stages. Throws Error naming the stage.
StagePlans make_stage_plans(const PlanOptions& options, const std::function<Plan(const PlanOptions&)>& plan);

}  // namespace kiln
