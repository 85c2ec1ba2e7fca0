// Seconds of traced operations on a machine.
#pragma once
#include <array>
#include <vector>

#include "plan/price/machine_profile.h"
#include "step/span.h"

namespace kiln {

// The seconds of one operation, overhead included: interpolated in what was measured on this machine;
// elsewhere the longer of its arithmetic at the rate that its shape reaches and of its memory traffic. Throws
// Error when the machine does not compute in its dtype.
double price(const OpRecord& op, const MachineProfile& machine);

struct StepPrice {
  double seconds = 0;                             // of the step on one device
  std::array<double, kNumStepPhases> by_phase{};  // StepPhase -> seconds
};
StepPrice price_step(const std::vector<Span>& spans, const MachineProfile& machine);

}  // namespace kiln
