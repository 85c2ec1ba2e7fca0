// A plan's weights, samples and cost in words: how many they are, what they take on a disk, and how fast they
// come.
#pragma once
#include <string>

#include "plan/run/plan.h"

namespace kiln {

// Returns "675 M weights", or "860 M weights, adapter of 3.2 M".
std::string weights_text(const Plan& plan);
std::string samples_text(const DataPlan& data);
std::string rate_text(const Plan& plan);
// Returns `before` and the cost, "1234", "12.34" or "< 0.01". Empty where the plan knows no price.
std::string cost_text(const PlanOptions& options, double cost, const char* before = "");

}  // namespace kiln
