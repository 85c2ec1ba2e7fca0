// The samples of a plan in words: what they take on a disk, and how fast they come.
#pragma once
#include <string>

#include "plan/run/plan.h"

namespace kiln {

std::string samples_text(const DataPlan& data);
std::string rate_text(const Plan& plan);

}  // namespace kiln
