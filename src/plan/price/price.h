// Seconds of traced operations on a machine.
#pragma once
#include <array>
#include <vector>

#include "plan/price/machine_profile.h"
#include "step/span.h"

namespace kiln {

// The seconds of one operation at the machine's present speed, overhead included: what was measured of it in
// its very shape; else interpolated in what was measured on this machine; elsewhere the longer of its
// arithmetic at the rate that its shape reaches and of its memory traffic. Throws Error when the machine does
// not compute in its dtype.
double price(const OpRecord& op, const MachineProfile& machine);

struct StepPrice {
  double seconds = 0;                             // of the step on one device
  std::array<double, kNumStepPhases> by_phase{};  // StepPhase -> seconds
};
StepPrice price_step(const std::vector<Span>& spans, const MachineProfile& machine);

// The share of a step's seconds that comes from operations measured in their very shapes.
double measured_share(const std::vector<Span>& spans, const MachineProfile& machine);

// How far a step's time may be from its price, as a share of it: an interval of so much to either side is
// meant to hold 95 of 100 (benchmarks/plan_time.cpp says how many it held). It goes by what is known of each
// operation, and by how steady the machine is. 0 where nothing was measured: no interval is known.
double time_error(const std::vector<Span>& spans, const MachineProfile& machine);

}  // namespace kiln
