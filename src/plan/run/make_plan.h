// `kiln plan`: the plan of a run from its options.
#pragma once
#include <optional>

#include "plan/run/plan.h"

namespace kiln {

// Throws Error: unknown GPU, a batch that the GPUs do not divide, a stage without ranks, options that cannot
// be trained.
Plan make_plan(const PlanOptions& options);

// Notes in a plan in f32 how much faster half precision would be, where the GPU has it: by planning that too.
void compare_with_half_precision(Plan& plan);

// Adds the speed of each lane, where there are several. Lanes of as many latents take the same time.
void add_lane_speeds(Plan& plan);

// Adds what others measured of this model on as many of these GPUs, each beside its own plan.
void compare_with_published(Plan& plan);

// The parts of make_plan, for who has a trace or plans many configurations.
// Finds the profile of --gpu, in TF32 where that is asked for, with the memory of --gpu-memory and no more
// than
// --memory-budget.
MachineProfile planned_machine(const PlanOptions& options);
void check_plan(const PlanOptions& options, const MachineProfile& machine);  // throws what make_plan throws
// What most batches look like, where they differ: captions of the mean length, pictures of the mean area.
std::optional<DataShape> usual_shape(const DataShape& data);
// The memory of the largest batch of the data, and the time of what most batches look like.
Plan plan_data(const PlanOptions& options, const MachineProfile& machine, const DataShape& data);
// `trace`: of options.train on options.gpus ranks, on `data` and the machine's kind of device.
Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataShape& data,
                  const StepTrace& trace);

}  // namespace kiln
