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

// Folders of a run whose disks are measured; "": there is none.
struct CalibratedFolders {
  std::string data;       // only read
  std::string offloaded;  // --nvme-path, read and written
};

// Measures steps for `seconds`, and takes a few seconds more for the rest: products, decoding of pictures,
// the disks of `folders` and of the folder of profiles, which is written to if no other is on its disk.
// Prints progress. Does not store the result (store_profile() does that).
MachineProfile calibrate(at::Device device, double seconds = kCalibrationSeconds,
                         const CalibratedFolders& folders = {});

}  // namespace kiln
