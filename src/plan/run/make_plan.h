// `kiln plan`: the plan of a run from its options.
#pragma once
#include "plan/run/plan.h"

namespace kiln {

// Throws Error: unknown GPU, a batch that the GPUs do not divide, a stage without ranks, options that cannot
// be trained.
Plan make_plan(const PlanOptions& options);

// The parts of make_plan, for who has a trace or plans many configurations.
MachineProfile planned_machine(const PlanOptions& options);  // of --gpu, in TF32 where that is asked for
void check_plan(const PlanOptions& options, const MachineProfile& machine);  // throws what make_plan throws
// `trace`: of options.train on options.gpus ranks, on `data` and the machine's kind of device.
Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataShape& data,
                  const StepTrace& trace);

}  // namespace kiln
