// DiT's row of the registry.
#pragma once
#include "models/family.h"

namespace kiln {

Family dit_family();

}  // namespace kiln
