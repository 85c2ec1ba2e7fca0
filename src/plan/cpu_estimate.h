// This machine's CPU when nobody has calibrated it.
#pragma once
#include "plan/machine_profile.h"

namespace kiln {

// From a tenth of a second of measurement, once per process.
MachineProfile estimate_cpu();

// Bytes that this process may use: the machine's, or what its control group allows.
int64_t host_memory_bytes();

}  // namespace kiln
