// Measuring this machine: real training steps of small models, timed operation by operation.
#pragma once
#include <string>

#include "plan/machine_profile.h"

namespace kiln {

inline constexpr double kCalibrationSeconds = 55;

// Steps are measured for so long, and a few seconds go for the rest. `device`: "cpu" or "cuda". Prints
// progress. The result is not stored (store_profile does that). Throws Error when there is no such device.
MachineProfile calibrate(const std::string& device, double seconds = kCalibrationSeconds);

}  // namespace kiln
