// Measures this machine by real training steps, timed operation by operation: of small models in advance, and
// on demand the operations of a planned step that the profile of this machine does not have.
#pragma once
#include <string>

#include "models/family.h"
#include "plan/price/machine_profile.h"
#include "plan/price/step_timing.h"
#include "run/train_options.h"
#include "train/setup.h"

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

// How fast the ranks of a CPU exchange tensors.
struct RankLinks {
  double hop_s = 0;        // of one message
  double bytes_per_s = 0;  // that a rank of a ring sends
};

// Measures two ranks in this process, connected as those of a run are, for about a second. REQUIRES: nothing
// in this process has used c10d.
RankLinks measure_rank_links();

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
