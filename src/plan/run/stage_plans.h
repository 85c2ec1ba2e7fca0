// The plans of a run's stages: the memory it needs is that of the worst, the time the sum.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "plan/run/plan.h"

namespace kiln {

struct StagePlans {
  std::vector<std::string> names;  // "stage 2 (large)"
  std::vector<Plan> plans;         // of each alone, with its own steps
  size_t worst = 0;                // the one that needs the most memory
  int64_t steps = 0;
  double days = 0, cost = 0;
  bool fits = true;  // all of them
};

// REQUIRES: options.train has stages. `plan`: of one stage. Throws Error naming the stage.
StagePlans make_stage_plans(const PlanOptions& options, const std::function<Plan(const PlanOptions&)>& plan);

}  // namespace kiln
