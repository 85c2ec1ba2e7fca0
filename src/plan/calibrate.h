// Measuring this machine: real training steps of small models, timed operation by operation.
#pragma once
#include <string>

#include "plan/machine_profile.h"

namespace kiln {

// About a minute. `device`: "cpu" or "cuda". Prints progress. The result is not stored.
MachineProfile calibrate(const std::string& device);
// Writes it into profiles_folder() and returns the path. Throws Error.
std::string store_profile(const MachineProfile& profile);

}  // namespace kiln
