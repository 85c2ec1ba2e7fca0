// `kiln plan`: the plan of a run from its options.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/family.h"
#include "plan/run/plan.h"

namespace kiln {

// Plans the run of these options. Throws Error for an unknown GPU, a batch that the GPUs do not divide, a
// stage without ranks, and options that cannot be trained.
Plan make_plan(const PlanOptions& options);

// Notes in a plan in f32 how much faster half precision would be, if the GPU has it. Plans that too.
void compare_with_half_precision(Plan& plan);

// Advises against recomputing and offloading activations where the memory has room for all of them. Plans
// that too.
void compare_with_keeping_all(Plan& plan);

// Adds the speed of each lane, if there are several. Lanes with equally many latents take the same time.
void add_lane_speeds(Plan& plan);

// Adds what others measured of this model on as many of these GPUs, each beside its own plan.
void compare_with_published(Plan& plan);

// The parts of make_plan() follow, for callers that have a trace or plan many configurations.

// Finds the profile of --gpu, in TF32 if that is asked for, with the memory of --gpu-memory, the nodes of
// --gpus-per-node and --network-gbit and, for a GPU, at most --memory-budget.
MachineProfile planned_machine(const PlanOptions& options);
void check_plan(const PlanOptions& options, const MachineProfile& machine);  // throws what make_plan throws
// Returns what most batches look like, if batches differ: captions of the mean length, pictures of the mean
// area.
std::optional<DataShape> usual_shape(const DataShape& data);

// What plans say of a run's data. All plans of a run share it, because a large data set takes long to read.
struct DataOutlook : DataDescription {
  DataPlan samples{};                  // without decode_s, which depends on the machine
  std::vector<ImageHeader> headers{};  // of some pictures; empty where none are read
  int64_t validation_images = 0;       // that a validation takes; 0: not known
};
// Reads the data of the options, or assumes what it is like if it is not here. Throws Error if it cannot be
// trained on.
DataOutlook read_data_outlook(const PlanOptions& options);

// Plans the memory of the largest batch of the data, and the time of a batch of usual_shape().
Plan plan_data(const PlanOptions& options, const MachineProfile& machine, const DataOutlook& data);
// Does the same with traces that the caller makes: of the options' step on a shape of data. They stay valid.
using Tracer = std::function<const StepTrace&(const DataShape&)>;
Plan plan_traced(const PlanOptions& options, const MachineProfile& machine, const DataOutlook& data,
                 const Tracer& traced);
// Makes the plan from a trace. `trace`: that of options.train on options.gpus ranks, on `data` and the
// machine's kind of device.
Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataOutlook& data,
                  const StepTrace& trace);

// Fills in what follows from a plan's step: days, cost, other numbers of GPUs, milestones, checkpoints.
void add_outlook(Plan& plan, const StepTrace& trace);
// Fills in the samples and the rate at which they are read.
void add_data(Plan& plan, const DataOutlook& data);

// Fills in advice on what to change: one line each, with the reason and the option to change.
void add_advice(Plan& plan, const StepTrace& trace);

// Returns the published FID of the model at this size, the one nearest to `steps`: "19.47 at 400K" (50,000
// pictures without guidance, after so many steps) or "5.81 MJHQ" (the released model, guided, on MJHQ-30K).
// Empty: none is known.
std::string quality_text(const TrainOptions& options, int64_t steps);
// Returns what the authors of the model published of its training. global_batch is 0 if that is nothing.
PublishedTraining published_run(const TrainOptions& options);

// The plans of a run's stages. The run needs the memory of the worst one and the time of all.
struct StagePlans {
  std::vector<std::string> names;  // "stage 2 (large)"
  std::vector<Plan> plans;         // each stage alone, with its own steps
  size_t worst = 0;                // the one that needs the most memory
  int64_t steps = 0;
  double days = 0, cost = 0;
  bool fits = true;  // all of them
};

// Plans each stage with `plan`. REQUIRES: options.train has stages. Throws Error naming the stage.
StagePlans make_stage_plans(const PlanOptions& options, const std::function<Plan(const PlanOptions&)>& plan);

}  // namespace kiln
