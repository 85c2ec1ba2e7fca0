// A plan's weights and samples in words: how many they are, what they take on a disk, and how fast they come.
#pragma once
#include <string>

#include "plan/run/plan.h"

namespace kiln {

// Returns "675 M weights", or "860 M weights, adapter of 3.2 M".
std::string weights_text(const Plan& plan);
std::string samples_text(const DataPlan& data);
std::string rate_text(const Plan& plan);

}  // namespace kiln
