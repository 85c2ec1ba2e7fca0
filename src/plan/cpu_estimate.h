// This machine's CPU when nobody has calibrated it.
#pragma once
#include "plan/machine_profile.h"

namespace kiln {

// From a tenth of a second of measurement, once per process.
MachineProfile estimate_cpu();

}  // namespace kiln
