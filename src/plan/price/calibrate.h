// Measures this machine by real training steps of small models, timed operation by operation.
#pragma once
#include "models/family.h"
#include "plan/price/machine_profile.h"
#include "run/train_options.h"

namespace kiln {

// Returns the options of the training that a workload of a family stands for.
TrainOptions calibration_step(const Family& family, const CalibrationWorkload& workload, at::ScalarType dtype,
                              at::Device device);

inline constexpr double kCalibrationSeconds = 110;

// Measures steps for `seconds`, and takes a few seconds more for the rest: products, decoding of pictures,
// the disks of `folders` and of the folder of profiles. Prints progress. Does not store the result
// (store_profile() does that).
MachineProfile calibrate(at::Device device, double seconds = kCalibrationSeconds,
                         const std::vector<std::string>& folders = {});

}  // namespace kiln
