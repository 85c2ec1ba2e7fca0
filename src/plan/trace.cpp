#include "plan/trace.h"

#include <algorithm>
#include <optional>

#include "core/allocations.h"
#include "core/aten.h"
#include "data/batches.h"
#include "plan/engine_sums.h"

namespace kiln {

namespace {

// The most bytes alive, for what runs outside the step.
class PeakBytes : public AllocationObserver {
 public:
  void allocated(uint64_t, size_t bytes) override {
    live_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, live_);
  }
  void freed(uint64_t, size_t bytes) override { live_ -= static_cast<int64_t>(bytes); }
  int64_t peak() const { return peak_; }

 private:
  int64_t live_ = 0, peak_ = 0;
};

// Phases go to both.
class Observers : public StepObserver {
 public:
  Observers(StepObserver& first, StepObserver& second) : first_(first), second_(second) {}
  void begin(StepPhase phase, int64_t segment) override {
    first_.begin(phase, segment);
    second_.begin(phase, segment);
  }
  void end(StepPhase phase, int64_t segment) override {
    second_.end(phase, segment);
    first_.end(phase, segment);
  }

 private:
  StepObserver &first_, &second_;
};

// The loader's arrays, without memory. A step on a CPU reads them where they are: views, which allocate
// nothing. A step on a GPU copies them there: they are tensors on the CPU whose data nobody reads, and are
// copied to meta.
at::Tensor loader_array(at::IntArrayRef shape, at::ScalarType dtype, DryRunDevice device) {
  if (device == DryRunDevice::kCpu) return at::empty(shape, at::TensorOptions(at::kMeta).dtype(dtype));
  return at::from_blob(nullptr, shape, at::TensorOptions().dtype(dtype));
}

struct LoaderBatch {
  StepBatch tensors;
  at::Tensor time_uniform;
};

// The rows of the last rank, which has the most.
LoaderBatch loader_batch(const DataShape& data, int64_t global_batch, DryRunDevice device,
                         int64_t world_size) {
  const int64_t size = rank_rows(global_batch, world_size - 1, world_size).count;
  const std::vector<int64_t> shape{size, data.channels, data.height, data.width};
  LoaderBatch batch{.tensors = {.x_0 = loader_array(shape, at::kFloat, device),
                                .noise = loader_array(shape, at::kFloat, device),
                                .timesteps = {},
                                .global_batch = global_batch},
                    .time_uniform = at::empty({size}, at::TensorOptions(at::kMeta).dtype(at::kDouble))};
  if (data.num_classes > 0) batch.tensors.class_labels = loader_array({size}, at::kLong, device);
  return batch;
}

// Makes the objective's tables on meta, which on a CPU are there before the first step.
void make_tables(const Objective& objective, const DataShape& data) {
  const auto meta = at::TensorOptions(at::kMeta);
  const at::Tensor x_0 = at::empty({1, data.channels, data.height, data.width}, meta);
  const NoisedBatch noised =
      objective.add_noise(x_0, x_0, objective.timesteps(at::empty({1}, meta.dtype(at::kDouble))));
  const int64_t channels = objective.learns_sigma() ? 2 * data.channels : data.channels;
  objective.loss(at::empty({1, channels, data.height, data.width}, meta), x_0, x_0, noised);
}

void describe(const Training& training, const TrainOptions& options, StepTrace& trace) {
  for (const auto& segment : training.denoiser->segments()) trace.segments.push_back(segment->name());
  const TrainingState& state = *training.state;
  for (const auto& segment : state.segments) {
    trace.segment_weights.push_back(segment.unit.layout().size);
    for (const FlatSlot& slot : segment.unit.layout().slots) trace.num_weights += slot.numel;
  }
  trace.flops_per_image = 3 * training.denoiser->shape().forward_flops;  // backward is twice the forward
  trace.zero = zero_options_of(options, trace.world_size);
  const FlatUnit& unit = state.segments.front().unit;
  trace.unit = {.device = at::kMeta,
                .compute_dtype = unit.compute_weights.scalar_type(),
                .grad_dtype = unit.grads.scalar_type(),
                .num_moments = static_cast<int64_t>(training.optimizer->moment_names().size()),
                .num_emas = static_cast<int64_t>(state.ema_decays.size()),
                .placement = state.placement,
                .weight_placement = state.weight_placement};
}

// Micro-steps of a step: so many whole ones, and the rest.
struct MicroSteps {
  int64_t images = 0, num_whole = 0, rest = 0;
};

MicroSteps micro_steps_of(const TrainOptions& options, int64_t world_size) {
  const int64_t rows = rank_rows(options.global_batch, world_size - 1, world_size).count;
  const int64_t images = rows_of_walk(options, world_size);
  return {.images = images, .num_whole = rows / images, .rest = rows % images};
}

// The first, which begins the gradients; the second, which ends the first one's reductions; one that stands
// for all between; the last, which reduces what was kept.
constexpr int64_t kTracedMicroSteps = 4;

// What every micro-step leaves behind until the step ends, as one block that lives as long as the step.
void add_left_behind(StepMemory& memory, int64_t bytes) {
  if (bytes <= 0) return;
  uint64_t id = 0;
  for (const MemoryEvent& event : memory.events) id = std::max(id, event.id);
  MemoryEvent block{.id = id + 1, .bytes = bytes, .kind = MemoryKind::kTemporaries};
  memory.events.insert(memory.events.begin(), block);
  block.bytes = -bytes;
  block.phase = memory.events.back().phase;
  memory.events.push_back(block);
  for (MemoryMark& mark : memory.marks) {
    mark.live_bytes += bytes;
    mark.peak_bytes += bytes;
  }
  find_peak(memory);
}

}  // namespace

std::pair<size_t, size_t> second_micro_step(const std::vector<OpRecord>& ops) {
  std::vector<size_t> begins;  // each begins with its input
  for (size_t i = 0; i < ops.size(); ++i)
    if (ops[i].phase == StepPhase::kInput && (i == 0 || ops[i - 1].phase != StepPhase::kInput))
      begins.push_back(i);
  return {begins.at(1), begins.at(2)};
}

std::shared_ptr<ProcessGroup> dry_group(int64_t world_size, int64_t ranks_per_node) {
  const int64_t local = ranks_per_node > 0 ? std::min(ranks_per_node, world_size) : world_size;
  return std::make_shared<ProcessGroup>(Ranks{.world_size = world_size, .local_world_size = local});
}

StepTrace trace_every_micro_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                                 int64_t world_size, int64_t ranks_per_node) {
  const DryRunScope dry_run(device);
  StepTrace trace;
  trace.device = device;
  trace.world_size = world_size;
  trace.ranks_per_node = ranks_per_node;
  std::optional<OpRecorder> ops;
  CollectiveLog collectives([&] { return ops ? ops->num_recorded() : 0; });
  const std::shared_ptr<ProcessGroup> group = dry_group(world_size, ranks_per_node);
  group->observe(&collectives);
  Training training;
  LoaderBatch batch;
  {
    PeakBytes load;
    const MetaAllocationScope scope(load);
    training = build_training(options, data, at::kMeta, group);
    trace.load_peak_bytes = load.peak();
    batch = loader_batch(data, options.global_batch, device, world_size);
    make_tables(*training.objective, data);
    // On a GPU's host the timesteps are there before the step and cost the device nothing.
    const at::Tensor timesteps = training.objective->timesteps(batch.time_uniform);
    if (device == DryRunDevice::kCuda)
      batch.tensors.timesteps = loader_array(timesteps.sizes(), timesteps.scalar_type(), device);
  }
  describe(training, options, trace);

  MemoryRecorder memory;
  memory.register_state(*training.state);
  {
    const MetaAllocationScope scope(memory);
    const EngineSumsInPlace sums;
    if (device == DryRunDevice::kCpu)
      batch.tensors.timesteps = training.objective->timesteps(batch.time_uniform);
    ops.emplace(/*timed=*/false);
    Observers both(memory, *ops);
    training.step->observe(&both);
    training.step->run(batch.tensors, options.lr);
    training.step->observe(nullptr);
    trace.ops = ops->take();
    ops.reset();
  }
  trace.memory = memory.finish();
  trace.offloaded = training.state->offloaded;
  trace.offloaded_activation_bytes = training.step->offloaded_activation_bytes();
  group->observe(nullptr);
  trace.collectives = std::move(collectives.events);
  return trace;
}

StepTrace trace_step(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size, int64_t ranks_per_node) {
  const MicroSteps micro = micro_steps_of(options, world_size);
  const int64_t left_out = micro.num_whole - kTracedMicroSteps;
  if (left_out < 2) return trace_every_micro_step(options, data, device, world_size, ranks_per_node);
  const auto traced = [&](int64_t num_whole) {
    TrainOptions shorter = options;
    shorter.global_batch = (micro.images * num_whole + micro.rest) * world_size;
    return trace_every_micro_step(shorter, data, device, world_size, ranks_per_node);
  };
  StepTrace trace = traced(kTracedMicroSteps);
  const int64_t left_behind = traced(kTracedMicroSteps + 1).memory.peak_bytes - trace.memory.peak_bytes;
  add_left_behind(trace.memory, left_out * left_behind);
  size_t op = second_micro_step(trace.ops).second;  // the third's first
  const auto in_input = [&] { return trace.ops[op].phase == StepPhase::kInput; };
  for (; in_input(); ++op) trace.ops[op].times += left_out;
  for (; !in_input(); ++op) trace.ops[op].times += left_out;
  return trace;
}

}  // namespace kiln
