#include "plan/trace/trace.h"
#include "step/span_recorder.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/allocations.h"
#include "core/aten.h"
#include "data/loader/batches.h"
#include "ops/op_recorder.h"
#include "ops/planned/engine_sums.h"
#include "plan/trace/passes.h"
#include "step/span_recorder.h"
#include "train/checkpoint_files.h"

namespace kiln {

namespace {

// Returns an array of the loader. A step on a CPU reads the arrays where they are, as views, which allocate
// nothing. A step on a GPU copies them from the host.
at::Tensor loader_array(const char* name, at::IntArrayRef shape, at::ScalarType dtype, DryRunDevice device) {
  return array_without_values(name, shape, dtype, device == DryRunDevice::kCpu ? at::kMeta : at::kCPU);
}

// Returns the batch of the last rank, which has the most rows.
BatchTensors loader_batch(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                          int64_t world_size) {
  const int64_t size = rank_rows(options.global_batch, world_size - 1, world_size).count;
  const auto make = [&](const HostArray& array, at::ScalarType dtype) {
    // The step is given the timesteps that are made of it.
    const bool stays = array.array == BatchArray::kTimeUniform;
    return loader_array(array.name, array.sizes, dtype, stays ? DryRunDevice::kCpu : device);
  };
  BatchTensors made = dry_batch(batch_options_of(options), data, size, make);
  made.batch.global_batch = options.global_batch;
  return made;
}

// Makes the objective's tables on meta. On a CPU they are there before the first step.
void make_tables(const Objective& objective, const DataShape& data) {
  const auto meta = at::TensorOptions(at::kMeta);
  const at::Tensor x_0 = at::empty({1, data.channels, data.largest().height, data.largest().width}, meta);
  const NoisedBatch noised =
      objective.add_noise(x_0, x_0, objective.timesteps(at::empty({1}, meta.dtype(at::kDouble))));
  const int64_t channels = objective.learns_sigma() ? 2 * data.channels : data.channels;
  objective.loss(at::empty({1, channels, data.largest().height, data.largest().width}, meta), x_0, x_0,
                 noised);
}

void describe_model(const Training& training, StepTrace& trace) {
  for (const auto& segment : training.denoiser->segments()) trace.segments.push_back(segment->name());
  for (const auto& segment : training.state->segments) {
    trace.layouts.push_back(segment.unit.layout());
    trace.segment_weights.push_back(segment.unit.layout().size);
    if (segment.is_head) continue;
    for (const FlatSlot& slot : segment.unit.layout().slots) trace.num_weights += slot.numel;
  }
  for (const auto& weight : training.state->frozen) trace.num_base_weights += weight->value.numel();
  trace.flops_per_image = flops_of_image(training, largest_extent(trace.data));
}

// The micro-steps of a step: whole ones of `images` each, and the rest.
struct MicroSteps {
  int64_t images = 0, num_whole = 0, rest = 0;
};

MicroSteps micro_steps_of(const TrainOptions& options, int64_t world_size) {
  const int64_t rows = rank_rows(options.global_batch, world_size - 1, world_size).count;
  const int64_t images = rows_of_walk(options, world_size);
  return {.images = images, .num_whole = rows / images, .rest = rows % images};
}

}  // namespace

at::Tensor array_without_values(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype,
                                at::Device device) {
  const auto options = at::TensorOptions(device).dtype(dtype);
  at::Tensor array = device.is_cpu() ? at::from_blob(nullptr, shape, options) : at::empty(shape, options);
  array.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      fmt::format("internal: a dry run reads the batch's {} on the host, where they have no values", name));
  return array;
}

void describe_state(const TrainingState& state, StepTrace& trace) {
  trace.zero = state.zero->options();
  const FlatUnit& unit = state.segments.front().unit;
  trace.unit = {.device = at::kMeta,
                .compute_dtype = unit.compute_weights.scalar_type(),
                .grad_dtype = unit.grads.scalar_type(),
                .master_dtype = unit.master_dtype(),
                .num_emas = static_cast<int64_t>(state.ema_decays.size()),
                .placement = state.placement};
  trace.state_bytes = 0;
  for (const auto& segment : state.segments) trace.state_bytes += segment.unit.state_bytes();
  trace.offloaded = state.offloaded;
}

void describe_checkpoint(const TrainingState& state, StepTrace& trace) {
  const CheckpointFiles files(state);
  trace.checkpoint_bytes = files.file_bytes();
  trace.checkpoint_part_bytes = 0;
  files.visit(state, [&](const at::Tensor& tensor, const auto&) {
    trace.checkpoint_part_bytes += static_cast<int64_t>(tensor.nbytes());
  });
}

int64_t num_micro_steps(const StepTrace& trace) {
  int64_t count = 0, last = -1;
  for (const Span& span : trace.spans)
    if (span.in_micro_step() && span.micro_step != std::exchange(last, span.micro_step)) count += span.times;
  return count;
}

bool updates_beside(const StepTrace& trace) {
  return trace.options.compute.updates_beside() && trace.unit.placement.is_on_device();
}

BatchTensors dry_batch(const BatchOptions& options, const DataShape& data, int64_t rows,
                       const ArrayMaker& make) {
  const int64_t rows_each = data.text.width > 0 ? data.text.max_rows : 0;
  BatchTensors made = batch_tensors(batch_shape(options, data, data.largest(), rows, rows * rows_each), make);
  if (rows_each > 0)
    for (int64_t sample = 0; sample <= rows; ++sample)
      made.batch.conditioning.text.host_offsets.push_back(sample * rows_each);
  return made;
}

std::shared_ptr<ProcessGroup> dry_group(int64_t world_size, int64_t ranks_per_node) {
  const int64_t local = ranks_per_node > 0 ? std::min(ranks_per_node, world_size) : world_size;
  return std::make_shared<ProcessGroup>(Ranks{.world_size = world_size, .local_world_size = local});
}

StepTrace trace_every_micro_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                 int64_t world_size, int64_t ranks_per_node) {
  const DryRunScope dry_run(device);
  const std::shared_ptr<ProcessGroup> group = dry_group(world_size, ranks_per_node);
  SpanRecorder loading;
  Training training;
  BatchTensors made;
  {
    const MetaAllocationScope scope(loading);
    group->observe(&loading);
    training = build_training(options, data, at::kMeta, group);
    made = loader_batch(options, data, device, world_size);
    make_tables(*training.objective, data);
    // On a GPU's host the timesteps are there before the step and cost the device nothing.
    const at::Tensor timesteps = training.objective->timesteps(made.time_uniform);
    if (device == DryRunDevice::kCuda)
      set_timesteps(made.batch,
                    loader_array("timesteps", timesteps.sizes(), timesteps.scalar_type(), device));
  }

  StepTrace trace;
  {
    OpRecorder ops(/*timed=*/false);
    SpanRecorder recorder(&ops);
    recorder.register_state(*training.state);
    const MetaAllocationScope scope(recorder);
    const EngineSumsInPlace sums;
    if (device == DryRunDevice::kCpu)
      set_timesteps(made.batch, training.objective->timesteps(made.time_uniform));
    ops.take();  // drops those of the loader
    group->observe(&recorder);
    training.step->observe(&recorder);
    training.step->run(made.batch, options.lr.peak);
    training.step->observe(nullptr);
    group->observe(nullptr);
    static_cast<RecordedStep&>(trace) = recorder.finish();
  }
  trace.under_way = loading.finish().under_way;
  trace.device = device;
  trace.options = options;
  trace.data = data;
  trace.world_size = world_size;
  trace.ranks_per_node = ranks_per_node;
  trace.offloaded_activation_bytes = training.step->offloaded_activation_bytes();
  describe_model(training, trace);
  describe_state(*training.state, trace);
  describe_checkpoint(*training.state, trace);
  return trace;
}

StepTrace trace_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size, int64_t ranks_per_node) {
  const MicroSteps micro = micro_steps_of(options, world_size);
  const auto traced = [&](int64_t num_whole) {
    TrainOptions shorter = options;
    shorter.global_batch = (micro.images * num_whole + micro.rest) * world_size;
    return trace_every_micro_step(shorter, data, device, world_size, ranks_per_node);
  };
  if (micro.num_whole <= kDistinctPasses + 1)
    return trace_every_micro_step(options, data, device, world_size, ranks_per_node);
  StepTrace trace = traced(kDistinctPasses);
  fold_equal_passes(trace, micro.num_whole, own_peak_bytes(traced(kDistinctPasses + 1)));
  trace.options = options;
  return trace;
}

}  // namespace kiln
