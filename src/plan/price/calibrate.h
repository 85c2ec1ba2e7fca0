// Measuring this machine: real training steps of small models, timed operation by operation.
#pragma once
#include "plan/price/machine_profile.h"

namespace kiln {

inline constexpr double kCalibrationSeconds = 55;

// Steps are measured for so long, and a few seconds go for the rest. Prints progress. The result is not
// stored (store_profile does that).
MachineProfile calibrate(at::Device device, double seconds = kCalibrationSeconds);

}  // namespace kiln
