// Seconds of traced operations on a machine.
#pragma once
#include <array>
#include <vector>

#include "parallel/machine.h"
#include "plan/price/machine_profile.h"
#include "step/span.h"

namespace kiln {

// Returns the seconds of one operation at the machine's present speed, overhead included. They were measured
// in its exact shape, or else are interpolated in what was measured on the machine. If nothing was, they are
// the longer of its arithmetic, at the rate that its shape reaches, and its memory traffic. Throws Error if
// the machine does not compute in its dtype.
double price(const OpRecord& op, const MachineProfile& machine);

// The same in a step with these options, which may choose other algorithms (--untried-gpu).
double price(const OpRecord& op, const MachineProfile& machine, const ComputeOptions& compute);

struct StepPrice {
  double seconds = 0;                             // of the step on one device
  std::array<double, kNumStepPhases> by_phase{};  // StepPhase -> seconds
};
StepPrice price_step(const std::vector<Span>& spans, const MachineProfile& machine);

// Returns the share of a step's seconds that comes from operations measured in their exact shapes.
double measured_share(const std::vector<Span>& spans, const MachineProfile& machine);

// Returns how far a step's time may be from its price, as a share of it. An interval of this size to either
// side is meant to hold 95 of 100 steps (benchmarks/plan_time.cpp says how many it held). It depends on what
// is known of each operation and on how steady the machine is. 0 if nothing was measured, as no interval is
// known then.
double time_error(const std::vector<Span>& spans, const MachineProfile& machine);

}  // namespace kiln
