// Measuring this machine: real training steps of small models, timed operation by operation.
#pragma once
#include <string>

#include "plan/machine_profile.h"

namespace kiln {

// About a minute. `device`: "cpu" or "cuda". Prints progress. The result is not stored (store_profile does
// that). Throws Error when there is no such device.
MachineProfile calibrate(const std::string& device);

}  // namespace kiln
