#include "plan/trace.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "core/allocations.h"

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

LoaderBatch loader_batch(const DataShape& data, int64_t size, DryRunDevice device) {
  const std::vector<int64_t> shape{size, data.channels, data.height, data.width};
  LoaderBatch batch{.tensors = {.x_0 = loader_array(shape, at::kFloat, device),
                                .noise = loader_array(shape, at::kFloat, device),
                                .timesteps = {}},
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

void describe(const Training& training, StepTrace& trace) {
  for (const auto& segment : training.denoiser->segments()) trace.segments.push_back(segment->name());
  for (const auto& segment : training.state->segments) {
    trace.segment_weights.push_back(segment.unit.layout().size);
    for (const FlatSlot& slot : segment.unit.layout().slots) trace.num_weights += slot.numel;
  }
  trace.flops_per_image = 3 * training.denoiser->shape().forward_flops;  // backward is twice the forward
}

}  // namespace

StepTrace trace_step(const TrainOptions& options, const DataShape& data, DryRunDevice device) {
  const DryRunScope dry_run(device);
  Training training;
  LoaderBatch batch;
  StepTrace trace;
  {
    PeakBytes load;
    const MetaAllocationScope scope(load);
    training = build_training(options, data, at::kMeta);
    trace.load_peak_bytes = load.peak();
    batch = loader_batch(data, options.global_batch, device);
    make_tables(*training.objective, data);
    // On a GPU's host the timesteps are there before the step and cost the device nothing.
    const at::Tensor timesteps = training.objective->timesteps(batch.time_uniform);
    if (device == DryRunDevice::kCuda)
      batch.tensors.timesteps = loader_array(timesteps.sizes(), timesteps.scalar_type(), device);
  }
  describe(training, trace);

  MemoryRecorder memory;
  memory.register_state(*training.state);
  {
    const MetaAllocationScope scope(memory);
    if (device == DryRunDevice::kCpu)
      batch.tensors.timesteps = training.objective->timesteps(batch.time_uniform);
    OpRecorder ops(/*timed=*/false);
    Observers both(memory, ops);
    training.step->observe(&both);
    training.step->run(batch.tensors, options.lr);
    training.step->observe(nullptr);
    trace.ops = ops.take();
  }
  trace.memory = memory.finish();
  return trace;
}

}  // namespace kiln
