// Measuring on demand: the operations of a planned step that the profile of this machine does not have.
#pragma once
#include <string>

#include "plan/price/machine_profile.h"
#include "plan/price/step_timing.h"
#include "train/setup.h"

namespace kiln {

// Adds the operations of a timed step to the profile's table: the average of those of one shape, so that
// their sum and the profile's overheads are what the step took.
void add_step(MachineProfile& profile, const StepTiming& timing);

struct StepMeasurement {
  bool is_done = false;  // the table has the operations of the step
  std::string text;      // what was measured, or why nothing was: one line
};
// Trains a few steps of these options on this machine, in at most so many seconds (but for the last step) and
// in half of the memory that is free: the whole model with up to two passes, or one of fewer blocks where
// that takes too long or too much. The profile's speed becomes that of the moments before and after. Nothing
// is measured where the table has all of it, or where no model is small enough. REQUIRES: the profile is of
// `device`.
StepMeasurement measure_step(MachineProfile& profile, const TrainOptions& options, const DataShape& data,
                             at::Device device, double seconds);

}  // namespace kiln
