// The time that one rank of several takes: the operations and collectives of its trace, priced. Formulas
// stand here only for links, the host's update and a disk.
#pragma once
#include <array>

#include "plan/ranks/sharding.h"

namespace kiln {

// One step in time, on a rank.
struct StepTime {
  double seconds = 0;
  std::array<double, kNumStepPhases> by_phase{};  // communication: what nothing hides
  double communication_s = 0;                     // that the links are busy, hidden or not
  double host_s = 0;  // of an offloaded optimizer: transfers and the host's update
};
// REQUIRES: the trace is of as many ranks at the same stage. Where the optimizer is, the trace need not say.
// Collectives begin and are waited for where the real step does it, in a steady step: the weights that the
// step before sent arrive during this one.
StepTime time_step(const StepTrace& trace, const MachineProfile& machine, const Sharding& sharding);

}  // namespace kiln
