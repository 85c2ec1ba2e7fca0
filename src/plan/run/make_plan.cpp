// A plan from a trace: memory, time, scaling, advice.
#include "plan/run/make_plan.h"

#include <algorithm>

#include "core/error.h"
#include "core/tensors.h"
#include "plan/price/this_machine.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "plan/run/outlook.h"
#include "plan/trace/planned_data.h"

namespace kiln {

namespace {

// `train` knows neither missing data nor missing folders; a plan needs none.
void check_training(const PlanOptions& options) {
  TrainOptions train = options.train;
  if (train.data.path.empty()) train.data.path = "synthetic";
  if (train.out.empty()) train.out = "planned";
  if (train.offload.uses_disk()) train.offload.nvme.folder = ".";
  validate(train);
}

void add_time(Plan& plan, const StepTrace& trace, const Sharding& sharding) {
  const StepTime time = time_step(trace, plan.machine, sharding);
  plan.step_s = time.seconds;
  plan.phase_s = time.by_phase;
  plan.communication_s = time.communication_s;
  plan.images_per_s = static_cast<double>(plan.options.train.global_batch) / time.seconds;
  const auto peak = plan.machine.peak_flops.find(plan.options.train.compute.product_dtype());
  const double flops = trace.flops_per_image * plan.images_per_s / static_cast<double>(sharding.gpus);
  if (peak != plan.machine.peak_flops.end()) plan.peak_share = flops / peak->second;
  const double by_sheet = data_sheet_flops(plan.machine.name, plan.options.train.compute.product_dtype(),
                                           plan.options.train.compute.tf32);
  if (by_sheet > 0) plan.mfu = flops / by_sheet;
}

}  // namespace

Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataShape& data,
                  const StepTrace& trace) {
  const Sharding sharding = sharding_of(options.train, options.gpus, machine);
  if (!is_of(trace, sharding)) return compose_plan(options, machine, data, trace_of_rank(trace, sharding));
  Plan plan;
  static_cast<MemoryPlan&>(plan) = plan_memory(machine, data, trace);
  plan.options = options;
  plan.machine = machine;
  plan.data = data;
  plan.num_weights = trace.num_weights;
  plan.rank_batch = options.train.global_batch / options.gpus;
  plan.micro_batch = rows_of_walk(options.train, options.gpus);
  plan.num_micro_steps = (plan.rank_batch + plan.micro_batch - 1) / plan.micro_batch;
  add_time(plan, trace, sharding);
  add_outlook(plan, trace);
  add_advice(plan, trace);
  return plan;
}

MachineProfile planned_machine(const PlanOptions& options) {
  MachineProfile machine = find_profile(options.gpu);
  return options.train.compute.tf32 ? with_tf32(std::move(machine)) : machine;
}

void check_plan(const PlanOptions& options, const MachineProfile& machine) {
  validate(sharding_of(options.train, options.gpus, machine));
  check_training(options);
  const auto not_negative = [](const char* option, double value) {
    if (!(value >= 0)) fail("plan", "--{} expects 0 or more, got {}", option, value);
  };
  not_negative("steps", static_cast<double>(options.steps));
  not_negative("dataset-size", static_cast<double>(options.dataset_size));
  not_negative("price-per-gpu-hour", options.price_per_gpu_hour);
  const int64_t batch = options.train.global_batch;
  if (batch % options.gpus != 0)
    fail("plan", "--global-batch {} is not a multiple of --gpus {}: the nearest that is are {} and {}", batch,
         options.gpus, std::max(options.gpus, batch / options.gpus * options.gpus),
         (batch / options.gpus + 1) * options.gpus);
  check_dtype(machine, options.train.compute.product_dtype());
}

Plan make_plan(const PlanOptions& options) {
  const MachineProfile machine = planned_machine(options);
  check_plan(options, machine);
  const DataShape data = planned_shape(options.train);
  return compose_plan(options, machine, data,
                      trace_step(options.train, data, machine.device, options.gpus,
                                 sharding_of(options.train, options.gpus, machine).ranks_per_node));
}

}  // namespace kiln
