// What a plan should be changed in: one line each, with the reason and the option to change.
#pragma once
#include <string>
#include <vector>

#include "plan/plan.h"

namespace kiln {

void add_advice(Plan& plan, const StepTrace& trace);

}  // namespace kiln
