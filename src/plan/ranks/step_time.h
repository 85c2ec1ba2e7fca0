// Prices the operations and collectives of a trace: the time that one rank of several takes. Only links, the
// host's update and a disk have formulas here.
#pragma once
#include <array>

#include "plan/ranks/rank_step.h"

namespace kiln {

// The time of one step on a rank.
struct StepTime {
  double seconds = 0;
  std::array<double, kNumStepPhases> by_phase{};  // communication is what nothing hides
  double communication_s = 0;                     // time that the links are busy, hidden or not
  double host_s = 0;  // time of an offloaded optimizer: transfers and the host's update
};
// Returns the time of a steady step. Collectives begin and are waited for where the real step does so, and
// the weights that the step before sent arrive during this one. REQUIRES: the trace is of as many ranks, in
// all and per node, at the same stage. It may have the optimizer elsewhere.
StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding);

}  // namespace kiln
