// How the state of a planned run is divided among its ranks.
#pragma once
#include <string>

#include "plan/price/machine_profile.h"
#include "plan/trace/trace.h"

namespace kiln {

struct Sharding {
  int64_t gpus = 1;
  int64_t zero_stage = 0;  // 1: optimizer state and averages, 2: gradients too, 3: weights too
  Placement offload_optimizer = Placement::kDevice;  // of master, moments and averages
  Placement offload_params = Placement::kDevice;     // of the weights, at stage 3
  int64_t ranks_per_node = 0;  // that state is divided among; nodes hold copies. 0: it is divided among all
};
Sharding sharding_of(const TrainOptions& options, int64_t gpus, const MachineProfile& machine);
// Throws Error: a stage without ranks, unknown values.
void validate(const Sharding& sharding);

// Whether the trace is of such a rank; else trace_of_rank() (plan/ranks/rank_step.h) makes one that is.
bool is_of(const StepTrace& trace, const Sharding& sharding);

}  // namespace kiln
