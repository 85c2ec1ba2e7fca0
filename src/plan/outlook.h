// From one step's memory and time to a whole run: days, cost, other numbers of GPUs, milestones, disk, data
// rates.
#pragma once
#include "plan/plan.h"

namespace kiln {

// Fills in everything of `plan` that follows from its step. The options are in it.
void add_outlook(Plan& plan, const StepTrace& trace);

// Global batch, learning rate and steps that the authors of a model published.
struct PublishedRun {
  int64_t global_batch = 0;
  double lr = 0;
  int64_t steps = 0;
  const char* source = "";
};
PublishedRun published_run(const TrainOptions& options);

}  // namespace kiln
