// The time that one rank of several takes, on any number of ranks and at any stage: the operations and
// collectives of a trace of as many ranks (plan/trace.h) or of one composed for them (plan/rank_walk.h).
// Formulas stand here only for prices: links, the host's update, a disk.
#pragma once
#include <array>
#include <string>

#include "plan/machine_profile.h"
#include "plan/trace.h"

namespace kiln {

struct Sharding {
  int64_t gpus = 1;
  int64_t zero_stage = 0;  // 1: optimizer state and averages, 2: gradients too, 3: weights too
  std::string offload_optimizer = "none";  // none, cpu, nvme: where master, moments and averages live
  std::string offload_params = "none";     // the same of the weights, at stage 3
  int64_t ranks_per_node = 0;  // that state is divided among; nodes hold copies. 0: it is divided among all
};
Sharding sharding_of(const TrainOptions& options, int64_t gpus, const MachineProfile& machine);
// Throws Error: a stage without ranks, unknown values.
void validate(const Sharding& sharding);

// Whether the trace is of such a rank; else trace_of_rank() (plan/rank_walk.h) makes one that is.
bool is_of(const StepTrace& trace, const Sharding& sharding);

// One step in time, on a rank.
struct StepTime {
  double seconds = 0;
  std::array<double, kNumStepPhases> by_phase{};  // communication: what nothing hides
  double communication_s = 0;                     // that the links are busy, hidden or not
  double host_s = 0;  // of an offloaded optimizer: transfers and the host's update
};
// Collectives begin and are waited for where the real step does it, in a steady step: the weights that the
// step before sent arrive during this one.
StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding);

}  // namespace kiln
