// From one step's memory and time to a whole run.
#pragma once
#include "models/family.h"
#include "plan/run/plan.h"

namespace kiln {

// Fills in what follows from a plan's step: days, cost, other numbers of GPUs, milestones, disk, data rates.
void add_outlook(Plan& plan, const StepTrace& trace);

// Fills in what a plan should be changed in: one line each, with the reason and the option to change.
void add_advice(Plan& plan, const StepTrace& trace);

// What the authors of the model published of its training; global_batch 0: nothing.
PublishedTraining published_run(const TrainOptions& options);

}  // namespace kiln
