// Measuring this machine: real training steps of small models, timed operation by operation.
#pragma once
#include "models/family.h"
#include "plan/price/machine_profile.h"
#include "run/train_options.h"

namespace kiln {

// The training that a workload of a family stands for.
TrainOptions calibration_step(const Family& family, const CalibrationWorkload& workload, at::ScalarType dtype,
                              at::Device device);

inline constexpr double kCalibrationSeconds = 110;

// Steps are measured for so long, and a few seconds go for the rest. Prints progress. The result is not
// stored (store_profile does that).
MachineProfile calibrate(at::Device device, double seconds = kCalibrationSeconds);

}  // namespace kiln
