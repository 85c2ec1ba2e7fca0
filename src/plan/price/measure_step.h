// Measures, on demand, the operations of a planned step that the profile of this machine does not have.
#pragma once
#include <string>

#include "plan/price/machine_profile.h"
#include "plan/price/step_timing.h"
#include "train/setup.h"

namespace kiln {

// Adds the operations of a timed step to the profile's table, averaged over those of one shape. They are
// scaled so that their sum and the profile's overheads are what the step took.
void add_step(MachineProfile& profile, const StepTiming& timing);

struct MeasuredStep {
  bool is_done = false;  // the table has the operations of the step
  std::string text;      // what was measured, or why nothing was: one line
};
// Trains a few steps of these options on this machine, in at most `seconds` (the last step may end later) and
// half of the free memory. Trains the whole model with up to two passes, or fewer of its blocks if that takes
// too long or too much. The profile's speed becomes that of the moments before and after. Measures nothing if
// the table has all operations already, or if no model is small enough. REQUIRES: the profile is of `device`.
MeasuredStep measure_step(MachineProfile& profile, const TrainOptions& options, const DataShape& data,
                          at::Device device, double seconds);

}  // namespace kiln
