// What follows the master weights after an optimizer whose passes write the compute weights of its slots.
#pragma once
#include "optim/optimizer.h"

namespace kiln {

// Moves the EMAs, and the compute weights that belong to no slot: what lies between slots, to begin each at a
// multiple, is zero, and the memory behind compute weights may be new.
void follow_master_between_slots(OptimizerSlice& slice);

}  // namespace kiln
