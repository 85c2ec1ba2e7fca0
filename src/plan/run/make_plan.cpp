// A plan from a trace: memory, time, scaling, advice.
#include "plan/run/make_plan.h"

#include <algorithm>
#include <cmath>
#include <list>

#include "core/error.h"
#include "core/tensors.h"
#include "models/registry.h"
#include "plan/price/attention_engine.h"
#include "plan/price/price.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "plan/run/plan.h"
#include "plan/trace/phases.h"
#include "run/option_values.h"
#include "train/setup.h"
#include "train/stages/stages.h"

namespace kiln {

namespace {

// Checks the options as training does, which refuses missing data and folders. A plan needs neither.
void check_training(const PlanOptions& options) {
  TrainOptions train = options.train;
  if (train.data.path.empty()) train.data.path = "synthetic";
  if (train.out.empty()) train.out = "planned";
  if (train.offload.uses_disk()) train.offload.nvme.folder = ".";
  validate(train);
}

void check_sharding(const PlanOptions& options, const Sharding& sharding) {
  validate(sharding);
  const bool offloads_weights = sharding.offload.at_stage(sharding.zero_stage).params != Placement::kDevice;
  if (sharding.zero_stage > 0 && sharding.gpus == 1 && !offloads_weights)
    fail("plan",
         "--zero-stage {} divides state among ranks, but --gpus is 1: give {}, or {}, which takes the same "
         "on one",
         sharding.zero_stage, options.change("gpus", "2"), options.change("zero-stage", "0"));
}

// Returns the seconds of encoding pictures: pass by pass, on the device, before the step that takes them.
double picture_seconds(const Plan& plan) {
  if (!plan.picture_encoder) return 0;
  double seconds = 0;
  for (const OpRecord& op : trace_encoding(*plan.picture_encoder, plan.options.train, plan.data,
                                           plan.machine.device, plan.options.gpus))
    seconds += price(op, plan.machine);
  return seconds * static_cast<double>(plan.rank_batch) / static_cast<double>(plan.micro_batch);
}

// Returns the seconds of encoding the captions that are not dropped. Weights that do not stay on the device
// are read once a step.
double caption_seconds(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  if (!plan.caption_encoder) return 0;
  const DryRunDevice device = plan.machine.device;
  const auto encoder = plan.caption_encoder->build(train.compute.held_dtype());
  const CaptionEncodingTrace trace =
      trace_caption_encoding(*encoder, train, plan.data, device, plan.options.gpus);
  double seconds = 0;
  for (const OpRecord& op : trace.ops) seconds += price(op, plan.machine);
  const double captions = (1 - train.data.text_dropout_prob) * static_cast<double>(plan.rank_batch);
  seconds *= captions / static_cast<double>(trace.captions);
  const bool is_streamed =
      trace_text_encoder(*plan.caption_encoder, train, plan.data, device, plan.options.gpus).is_streamed;
  if (is_streamed && plan.machine.disk_bytes_per_s > 0)
    seconds += static_cast<double>(weight_bytes(*encoder)) / plan.machine.disk_bytes_per_s;
  return seconds;
}

void add_time(Plan& plan, const StepTrace& trace, const Sharding& sharding) {
  const StepTime time = time_step(trace, plan.machine, sharding);
  plan.caption_encoding_s = caption_seconds(plan);
  plan.encoding_s = picture_seconds(plan) + plan.caption_encoding_s;
  plan.step_s = time.seconds + plan.encoding_s;
  plan.phase_s = time.by_phase;
  plan.communication_s = time.communication_s;
  plan.images_per_s = static_cast<double>(plan.options.train.global_batch) / plan.step_s;
  plan.measured_share = measured_share(trace.spans, plan.machine);
  plan.time_error = time_error(trace.spans, plan.machine);
  plan.peak_share = peak_share_of(trace, plan.machine, plan.rank_batch, plan.step_s);
}

std::map<std::string, int64_t> optimizer_bytes(const std::vector<FlatLayout>& layouts) {
  std::map<std::string, int64_t> bytes;
  for (const std::string& name : optimizer_names())
    bytes[name] = state_bytes(*make_optimizer({{"type", name}}), layouts);
  return bytes;
}

// Returns the options of one stage. `model`: the config of the first stage's model; empty for the first
// stage.
PlanOptions options_of(const PlanOptions& options, size_t index, const std::string& model) {
  const StageOptions& stage = options.train.stages[index];
  PlanOptions of_stage = options;
  of_stage.train = options_of_stage(options.train, index);
  if (!model.empty()) of_stage.train.model.config = model;
  if (stage.steps > 0) of_stage.train.max_steps = stage.steps;
  of_stage.train = with_length(of_stage.train, options.dataset_size);
  return of_stage;
}

}  // namespace

std::optional<DataShape> usual_shape(const DataShape& data) {
  const bool are_ragged = data.text.width > 0 && !data.text.is_padded;
  if (data.lanes.size() == 1 && !are_ragged) return std::nullopt;
  DataShape usual = data;
  if (are_ragged) usual.text.max_rows = std::max<int64_t>(1, std::llround(data.text.mean_rows));
  double mean_area = 0;
  for (const Lane& lane : data.lanes)
    mean_area += static_cast<double>(lane.area()) / static_cast<double>(data.lanes.size());
  usual.lanes = {*std::ranges::min_element(data.lanes, {}, [&](const Lane& lane) {
    return std::abs(static_cast<double>(lane.area()) - mean_area);
  })};
  return usual;
}

Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataOutlook& data,
                  const StepTrace& trace) {
  const Sharding sharding = sharding_of(options.train, options.gpus, machine);
  if (!is_of(trace, sharding)) return compose_plan(options, machine, data, trace_of_rank(trace, sharding));
  Plan plan;
  static_cast<MemoryPlan&>(plan) = plan_memory(machine, data, data.validation_images, trace);
  plan.options = options;
  plan.machine = machine;
  plan.data = data.shape;
  if (data.samples.reads_pictures) plan.picture_encoder = data.autoencoder;
  plan.caption_encoder = data.text_encoder;
  plan.num_weights = trace.num_weights;
  plan.num_base_weights = trace.num_base_weights;
  plan.flops_per_image = trace.flops_per_image;
  plan.rank_batch = options.train.global_batch / options.gpus;
  plan.micro_batch = rows_of_walk(options.train, options.gpus);
  plan.num_micro_steps = (plan.rank_batch + plan.micro_batch - 1) / plan.micro_batch;
  plan.optimizer_bytes = optimizer_bytes(trace.layouts);
  add_time(plan, trace, sharding);
  add_outlook(plan, trace);
  add_data(plan, data);
  add_advice(plan, trace);
  return plan;
}

MachineProfile planned_machine(const PlanOptions& options) {
  MachineProfile machine =
      with_disks_of(find_profile(options.gpu), options.train.data.path, options.train.offload.nvme.folder);
  if (!options.gpu_memory.empty())
    machine.memory_bytes = MemoryBudget::parse_size("gpu-memory", options.gpu_memory);
  if (options.gpus_per_node > 0) machine.gpus_per_node = options.gpus_per_node;
  if (options.network_gbit > 0) machine.network_bytes_per_s = network_rate(options.network_gbit);
  // On a CPU the budget is of the process, which kiln train counts in more detail (plan/fit).
  if (const int64_t budget = options.train.memory.budget.bytes();
      budget > 0 && machine.device == DryRunDevice::kCuda)
    machine.memory_bytes = std::min(machine.memory_bytes, budget);
  return options.train.compute.tf32 ? with_tf32(std::move(machine)) : machine;
}

void check_plan(const PlanOptions& options, const MachineProfile& machine) {
  check_sharding(options, sharding_of(options.train, options.gpus, machine));
  check_training(options);
  const auto not_negative = [](const char* option, double value) {
    if (!(value >= 0)) fail("plan", "--{} expects 0 or more, got {}", option, value);
  };
  not_negative("steps", static_cast<double>(options.steps));
  not_negative("dataset-size", static_cast<double>(options.dataset_size));
  not_negative("gpus-per-node", static_cast<double>(options.gpus_per_node));
  not_negative("network-gbit", options.network_gbit);
  not_negative("price-per-gpu-hour", options.price_per_gpu_hour);
  if (machine.device == DryRunDevice::kCpu && (options.gpus_per_node > 0 || options.network_gbit > 0))
    fail("plan",
         "--gpus-per-node and --network-gbit are only for GPUs: leave them out, a plan for CPUs is for one "
         "machine");
  const int64_t batch = options.train.global_batch;
  if (batch % options.gpus != 0)
    fail("plan", "--global-batch {} is not a multiple of --gpus {}: give {}, or {}", batch, options.gpus,
         options.change("global-batch",
                        std::to_string(std::max(options.gpus, batch / options.gpus * options.gpus))),
         options.change("global-batch", std::to_string((batch / options.gpus + 1) * options.gpus)));
  check_dtype(machine, options.train.compute.product_dtype());
}

Plan make_plan(const PlanOptions& options) {
  const MachineProfile machine = planned_machine(options);
  check_plan(options, machine);
  return plan_data(options, machine, read_data_outlook(options));
}

Plan plan_data(const PlanOptions& options, const MachineProfile& machine, const DataOutlook& data) {
  const Sharding sharding = sharding_of(options.train, options.gpus, machine);
  std::list<StepTrace> traces;
  return plan_traced(options, machine, data, [&](const DataShape& shape) -> const StepTrace& {
    return traces.emplace_back(trace_step(traced_options(options.train, machine), shape, machine.device,
                                          options.gpus, sharding.ranks_per_node));
  });
}

Plan plan_traced(const PlanOptions& options, const MachineProfile& machine, const DataOutlook& data,
                 const Tracer& traced) {
  const StepTrace& trace = traced(data.shape);
  Plan plan = compose_plan(options, machine, data, trace);
  if (const std::optional<DataShape> usual = usual_shape(data.shape)) {
    DataOutlook of_usual = data;
    of_usual.shape = *usual;
    const Plan timed = compose_plan(options, machine, of_usual, traced(*usual));
    static_cast<TimePlan&>(plan) = timed;
    plan.advice.clear();  // written again, with shares of the usual step
    add_advice(plan, trace);
  }
  return plan;
}

void add_lane_speeds(Plan& plan) {
  if (plan.data.lanes.size() == 1) return;
  const Sharding sharding = sharding_of(plan.options.train, plan.options.gpus, plan.machine);
  Plan of_lane{plan};
  of_lane.data = *usual_shape(plan.data);
  std::map<int64_t, double> seconds;  // by area
  for (const Lane& lane : plan.data.lanes) {
    double& step_s = seconds[lane.area()];
    if (step_s == 0) {
      of_lane.data.lanes = {lane};
      StepTrace trace = trace_step(traced_options(plan.options.train, plan.machine), of_lane.data,
                                   plan.machine.device, plan.options.gpus, sharding.ranks_per_node);
      if (!is_of(trace, sharding)) trace = trace_of_rank(trace, sharding, /*has_checkpoint_part=*/false);
      add_time(of_lane, trace, sharding);
      step_s = of_lane.step_s;
    }
    plan.lane_speeds.push_back(
        {.lane = lane,
         .step_s = step_s,
         .images_per_s = static_cast<double>(plan.options.train.global_batch) / step_s});
  }
}

void compare_with_half_precision(Plan& plan) {
  PlanOptions half = plan.options;
  if (plan.machine.device != DryRunDevice::kCuda || half.train.compute.dtype != at::kFloat) return;
  half.train.compute.dtype = half_dtype_of(plan.machine);
  half.has_scaling = false;
  plan.half_precision_speed = make_plan(half).images_per_s / plan.images_per_s;
}

void compare_with_published(Plan& plan) {
  const TrainOptions& train = plan.options.train;
  for (const MeasuredTraining& run : family_of(train.model.name).measured) {
    if (train.model.name != run.model || train.data.image_size != run.image_size ||
        plan.options.gpus != run.gpus || !plan.machine.name.starts_with(run.gpu))
      continue;
    PlanOptions like;
    like.gpu = plan.options.gpu;
    like.gpus = run.gpus;
    like.has_scaling = false;
    like.train.model.name = run.model;
    like.train.data.image_size = run.image_size;
    like.train.global_batch = run.global_batch;
    std::string options;
    const nlohmann::json settings = nlohmann::json::parse(run.options);
    for (const auto& [name, value] : settings.items()) {
      set_option(like.train, name, value);
      options += fmt::format("{}{} {}", options.empty() ? "" : ", ", name,
                             value.is_string() ? value.get<std::string>()
                             : value == true   ? "on"
                                               : value.dump());
    }
    plan.measured.push_back({.source = run.source,
                             .options = options,
                             .gpus = run.gpus,
                             .global_batch = run.global_batch,
                             .steps_per_s = run.steps_per_s,
                             .planned_steps_per_s = 1 / make_plan(like).step_s});
  }
}

StagePlans make_stage_plans(const PlanOptions& options, const std::function<Plan(const PlanOptions&)>& plan) {
  if (options.steps > 0)
    fail("plan", "--steps has no effect on a recipe of {} stages, each of which says its epochs or steps",
         options.train.stages.size());
  StagePlans stages;
  std::string model;
  for (size_t i = 0; i < options.train.stages.size(); ++i) {
    stages.names.push_back(stage_name(options.train.stages[i], i));
    try {
      stages.plans.push_back(plan(options_of(options, i, model)));
    } catch (const Error& error) {
      throw Error(fmt::format("{} ({})", error.what(), stages.names.back()));
    }
    const Plan& of_stage = stages.plans.back();
    if (model.empty()) {
      const TrainOptions& train = of_stage.options.train;
      const auto objective = make_objective(objective_config_of(train.objective));
      model = denoiser_config_of(train, of_stage.data, *objective).dump();
    }
    if (of_stage.needed_bytes > stages.plans[stages.worst].needed_bytes) stages.worst = i;
    stages.steps += of_stage.steps;
    stages.days += of_stage.days;
    stages.cost += of_stage.cost;
    stages.fits = stages.fits && of_stage.fits;
  }
  return stages;
}

}  // namespace kiln
