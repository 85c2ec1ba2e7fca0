// Seconds of traced operations on a machine.
#pragma once
#include <array>
#include <vector>

#include "plan/machine_profile.h"
#include "plan/op_recorder.h"

namespace kiln {

// Of one operation.
double price(const OpRecord& op, const MachineProfile& machine);

struct StepPrice {
  double seconds = 0;                                // of the step on one device
  std::array<double, kNumStepPhases> by_phase{};     // StepPhase -> seconds
  std::array<double, 4> by_class{};                  // OpClass -> seconds
  double flops = 0;                                  // of all matrix products and attention, recomputed ones included
};
StepPrice price_step(const std::vector<OpRecord>& ops, const MachineProfile& machine);

}  // namespace kiln
