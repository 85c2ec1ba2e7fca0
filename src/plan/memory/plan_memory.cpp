#include "plan/memory/plan_memory.h"

#include <algorithm>

#include "plan/memory/device_memory.h"
#include "plan/price/attention_engine.h"
#include "plan/trace/phases.h"
#include "train/checkpoint_saver.h"

namespace kiln {

namespace {

constexpr int64_t kNcclBytes = 384 << 20;       // channels of a communicator, outside the allocator
constexpr int64_t kHostProcessBytes = 1 << 30;  // a process with LibTorch's CUDA libraries and a context

using Peak = DeviceTimeline::Peak;

Peak larger(const Peak& a, const Peak& b) {
  return {.live_bytes = std::max(a.live_bytes, b.live_bytes),
          .reserved_bytes = std::max(a.reserved_bytes, b.reserved_bytes)};
}

struct PhasePeaks {
  Peak load, first, steady, validation, sampling, evaluation, encoding;
  bool out_of_memory = false;

  Peak most() const {
    Peak most = load;
    for (const Peak& peak : {first, steady, validation, sampling, evaluation, encoding})
      most = larger(most, peak);
    return most;
  }
};

class MemoryComposer {
 public:
  MemoryComposer(const MachineProfile& machine, const DataDescription& data, int64_t validation_images,
                 const StepTrace& trace);
  MemoryPlan run();

 private:
  bool validates() const { return options_.validation.is_on(); }
  bool draws_samples() const { return options_.samples.every > 0; }
  bool evaluates() const { return options_.evaluation.every > 0; }
  bool encodes_images() const { return encodes_pictures(data_.source); }
  bool encodes_validation_images() const { return encodes_held_out(options_.data, options_.validation); }
  int64_t text_encoder_bytes() const { return left_bytes(text_events_.load); }
  int64_t autoencoder_bytes() const { return left_bytes(autoencoder_events_.load); }

  // Bytes of what samples are judged with and by. They are on the device before the state is built.
  int64_t judge_bytes() const { return evaluation_.net_bytes + (cuda_ ? 0 : evaluation_.reference_bytes); }

  PhasePeaks play(int64_t capacity_bytes) const;
  PhasePeaks play_within(int64_t memory_bytes) const;
  void add_phases(const PhasePeaks& peaks);
  void add_phase(const std::string& name, const Peak& peak, int64_t host);
  void add_kinds(const Peak& steady);
  void add_notes();
  bool has_packed_attention() const;
  int64_t loader_bytes(const BatchOptions& draws, int64_t batch, bool of_pictures) const;
  int64_t checkpoint_copy_bytes() const;
  MemoryCurve curve() const;

  const MachineProfile& machine_;
  const DataDescription& data_;
  const StepTrace& trace_;
  const TrainOptions& options_;
  const bool cuda_;
  const int64_t communication_;
  const int64_t validation_rows_;
  MemoryEvents load_, validation_, sampling_;
  AutoencoderEvents autoencoder_events_;
  TextEncoderEvents text_events_;
  EvaluationTrace evaluation_;
  MemoryEvents drawing_;     // draws pictures to evaluate
  AutoencoderEvents drawn_;  // decodes them
  MemoryPlan plan_;
};

MemoryComposer::MemoryComposer(const MachineProfile& machine, const DataDescription& data,
                               int64_t validation_images, const StepTrace& trace)
    : machine_(machine),
      data_(data),
      trace_(trace),
      options_(trace.options),
      cuda_(machine.device == DryRunDevice::kCuda),
      communication_(communication_bytes(machine, trace.world_size)),
      validation_rows_(validates() ? rows_of_validation(trace.options, validation_images, trace.world_size)
                                   : 0) {
  const auto group = dry_group(trace.world_size, trace.ranks_per_node);
  load_ = trace_load(options_, data.shape, machine.device, group);
  // Tables of the objective are made at the first step and stay.
  const int64_t tables = trace.memory.persistent_bytes - left_bytes(load_);
  if (tables > 0) load_.push_back({.id = (uint64_t{1} << 47), .bytes = tables});
  if (validates())
    validation_ = trace_validation(options_, data.shape, validation_rows_, machine.device, group);
  if (draws_samples()) sampling_ = trace_sample_grid(options_, data.shape, machine.device, group);
  if (data.autoencoder)
    autoencoder_events_ = trace_autoencoder(options_, data, machine.device, trace.world_size,
                                            encodes_validation_images() ? validation_rows_ : 0);
  if (data.text_encoder)
    text_events_ = trace_text_encoder(*data.text_encoder, options_, data.shape, machine.device,
                                      trace.world_size, validation_rows_);
  if (!evaluates()) return;
  evaluation_ = trace_evaluation(options_, machine.device, trace.world_size);
  TrainOptions drawing = options_;
  drawing.samples.num_samples = options_.evaluation.images;
  drawing_ = trace_sample_grid(drawing, data.shape, machine.device, group);
  if (data.autoencoder) drawn_ = trace_autoencoder(drawing, data, machine.device, trace.world_size);
}

PhasePeaks MemoryComposer::play(int64_t capacity_bytes) const {
  DeviceTimeline timeline(cuda_, capacity_bytes);
  const auto play_both = [&](const MemoryEvents& first, const MemoryEvents& second) {
    const Peak before = timeline.play(first);
    return larger(before, timeline.play(second));
  };
  PhasePeaks peaks;
  if (judge_bytes() > 0) timeline.play(MemoryEvents{{.id = (uint64_t{1} << 46), .bytes = judge_bytes()}});
  const Peak encoders = play_both(autoencoder_events_.load, text_events_.load);
  peaks.load = timeline.play(load_);
  peaks.load.live_bytes = std::max(peaks.load.live_bytes, encoders.live_bytes);
  if (encodes_images()) peaks.encoding = timeline.play(autoencoder_events_.encode);
  if (data_.text_encoder) peaks.encoding = larger(peaks.encoding, timeline.play(text_events_.encode));
  MemoryEvents workspaces;
  for (int64_t i = 0; i < num_workspaces(options_.compute.cuda_graph); ++i)
    workspaces.push_back({.id = static_cast<uint64_t>(i), .bytes = machine_.workspace_bytes});
  timeline.play(workspaces);
  peaks.first = timeline.play(trace_.spans, updates_beside(trace_));
  peaks.steady = timeline.play(trace_.spans, updates_beside(trace_));
  if (validates())
    peaks.validation =
        larger(play_both(autoencoder_events_.validate, validation_), timeline.play(text_events_.validate));
  if (draws_samples()) peaks.sampling = play_both(sampling_, autoencoder_events_.decode);
  if (evaluates())
    peaks.evaluation = larger(play_both(drawing_, drawn_.decode), timeline.play(evaluation_.judge));
  peaks.out_of_memory = timeline.out_of_memory();
  return peaks;
}

// The allocator gives back what it has cached before it runs out. So a run fits if all its allocations can be
// served within `memory_bytes`, however much more they would reserve where there is more. For a run that does
// not fit, returns what it takes in the least memory that would do.
PhasePeaks MemoryComposer::play_within(int64_t memory_bytes) const {
  const PhasePeaks ample = play(/*capacity_bytes=*/0);
  if (!cuda_ || ample.most().reserved_bytes <= memory_bytes) return ample;
  constexpr int64_t kPrecision = 16 << 20;
  int64_t too_little = ample.most().live_bytes - 1, enough = ample.most().reserved_bytes;
  PhasePeaks least = ample;
  const auto try_with = [&](int64_t capacity) {
    const PhasePeaks peaks = play(capacity);
    if (peaks.out_of_memory) {
      too_little = std::max(too_little, capacity);
    } else {
      enough = capacity;
      least = peaks;
    }
    return !peaks.out_of_memory;
  };
  if (memory_bytes > too_little && try_with(memory_bytes)) return least;
  while (enough - too_little > kPrecision) try_with(too_little + (enough - too_little) / 2);
  return least;
}

// Returns the bytes of the loader's batches: those that wait, the one in use and the one being drawn.
int64_t MemoryComposer::loader_bytes(const BatchOptions& draws, int64_t batch, bool of_pictures) const {
  const Lane& largest = data_.shape.largest();
  const BatchShape shape = batch_shape(draws, data_.shape, largest, batch);
  const int64_t rows = shape.rows_with_halo();
  int64_t bytes = shape.bytes() + rows * static_cast<int64_t>(sizeof(int64_t));  // and the samples' numbers
  const int64_t pixels = largest.area() * autoencoder_events_.downsample * autoencoder_events_.downsample;
  if (of_pictures) bytes += rows * 4 * (3 * pixels - shape.sample_elements());
  return (options_.data.prefetch + 2) * bytes;
}

void MemoryComposer::add_phase(const std::string& name, const Peak& peak, int64_t host) {
  Footprint bytes{.device = machine_.context_bytes + communication_ + peak.reserved_bytes,
                  .host = host,
                  .pinned_host = trace_.offloaded.host + trace_.offloaded_activation_bytes,
                  .nvme = trace_.offloaded.disk};
  if (!cuda_) {  // host and device are one memory
    bytes.device += bytes.host + bytes.pinned_host;
    bytes.host = bytes.pinned_host = 0;
  }
  plan_.phases.push_back({.name = name, .live_bytes = peak.live_bytes, .bytes = bytes});
}

void MemoryComposer::add_kinds(const Peak& steady) {
  auto& by_kind = plan_.by_kind;
  for (const auto& [kind, bytes] : trace_.memory.peak_by_kind) by_kind[std::string(name_of(kind))] += bytes;
  by_kind["matmul"] += workspaces_bytes(machine_, options_.compute.cuda_graph);
  by_kind[std::string(name_of(MemoryKind::kAutoencoder))] = autoencoder_bytes();
  by_kind[std::string(name_of(MemoryKind::kTextEncoder))] = text_encoder_bytes();
  by_kind[std::string(name_of(MemoryKind::kFeatureNet))] = judge_bytes();
  plan_.peak_bytes = 0;
  for (const auto& [name, bytes] : by_kind) plan_.peak_bytes += bytes;
  plan_.overhead = {{"context", machine_.context_bytes},
                    {"communication", communication_},
                    {"allocator", cuda_ ? steady.reserved_bytes - plan_.peak_bytes : 0}};
  for (auto* map : {&plan_.by_kind, &plan_.overhead})
    std::erase_if(*map, [](const auto& entry) { return entry.second == 0; });
}

// Returns the host memory that a copy of this rank's part of a checkpoint takes.
int64_t MemoryComposer::checkpoint_copy_bytes() const {
  const CheckpointCopy copy = planned_checkpoint_copy(options_, machine_.device);
  return copy == CheckpointCopy::kMemory ? trace_.checkpoint_part_bytes : 0;
}

// Returns the step's curve, with the nets that encode and judge beside the training state.
MemoryCurve MemoryComposer::curve() const {
  if (!data_.autoencoder && !data_.text_encoder && !evaluates()) return memory_curve(trace_);
  RecordedStep step = trace_;
  step.memory.persistent[MemoryKind::kAutoencoder] = autoencoder_bytes();
  step.memory.persistent[MemoryKind::kTextEncoder] = text_encoder_bytes();
  step.memory.persistent[MemoryKind::kFeatureNet] = judge_bytes();
  return memory_curve(step);
}

void MemoryComposer::add_phases(const PhasePeaks& peaks) {
  const int64_t process = cuda_ ? kHostProcessBytes : 0,
                stepping =
                    process + loader_bytes(batch_options_of(options_),
                                           options_.global_batch / trace_.world_size, encodes_images()),
                validating =
                    stepping + loader_bytes(BatchOptions(), validation_rows_, encodes_validation_images());
  add_phase("load", peaks.load, process);
  if (encodes_images() || data_.text_encoder) add_phase("extract", peaks.encoding, stepping);
  add_phase("first step", peaks.first, stepping);
  add_phase("steady step", peaks.steady, stepping);
  if (validates()) add_phase("validation", peaks.validation, validating);
  if (draws_samples()) add_phase("validation sampling", peaks.sampling, stepping);
  if (evaluates())
    add_phase("evaluation", peaks.evaluation,
              stepping + (cuda_ ? evaluation_.reference_bytes + evaluation_.host_bytes : 0));
  const Peak idle{.live_bytes = trace_.memory.persistent_bytes + autoencoder_bytes() + text_encoder_bytes() +
                                judge_bytes() + workspaces_bytes(machine_, options_.compute.cuda_graph),
                  .reserved_bytes =
                      cuda_ ? peaks.steady.reserved_bytes
                            : autoencoder_bytes() + text_encoder_bytes() + judge_bytes() + left_bytes(load_)};
  const int64_t copy = checkpoint_copy_bytes();
  Peak saving = idle;
  if (!cuda_ && copy > 0) {  // the copy is written while the run goes on
    for (const Peak& peak : {peaks.steady, peaks.validation, peaks.sampling, peaks.evaluation})
      saving = larger(saving, peak);
    saving.live_bytes += copy;
  }
  add_phase("checkpoint", saving, copy > 0 && validates() ? validating + copy : stepping + copy);
  add_phase("resume", {.live_bytes = idle.live_bytes, .reserved_bytes = peaks.load.reserved_bytes}, process);
}

bool MemoryComposer::has_packed_attention() const {
  return std::ranges::any_of(trace_.spans, [](const Span& span) {
    return std::ranges::any_of(span.ops,
                               [](const OpRecord& op) { return op.name == "kiln::packed_attention"; });
  });
}

void MemoryComposer::add_notes() {
  if (const auto& outline = data_.autoencoder)
    plan_.notes.push_back(fmt::format(
        "workspaces of the autoencoder's convolutions{}",
        outline->assumed.empty() ? std::string()
                                 : fmt::format("; its architecture is taken to be {}", outline->assumed)));
  if (const auto& outline = data_.text_encoder; outline && outline->assumed)
    plan_.notes.push_back(
        fmt::format("the text encoder of {}, which is not here: the published {} stands for it",
                    outline->folder, outline->assumed->name));
  if (plan_.attention == "cudnn")
    plan_.notes.push_back(
        "the scratch of cuDNN's attention, which torch takes on this GPU without --deterministic: flash "
        "attention's is counted");
  if (!evaluation_.note.empty()) plan_.notes.push_back(evaluation_.note);
  if (const std::string settings = unusual_allocator_settings(); cuda_ && !settings.empty())
    plan_.notes.push_back(fmt::format(
        "the effect of {} on the memory that the allocator reserves: this plan is for its defaults",
        settings));
}

MemoryPlan MemoryComposer::run() {
  const PhasePeaks peaks = play_within(machine_.memory_bytes - machine_.context_bytes - communication_);
  add_phases(peaks);
  add_kinds(peaks.steady);
  if (cuda_ && has_packed_attention()) plan_.attention = attention_engine_of(machine_, options_.compute);
  add_notes();
  plan_.reserved_bytes = peaks.steady.reserved_bytes;
  for (const PhasePlan& phase : plan_.phases)
    if (phase.bytes.device > plan_.needed_bytes) {
      plan_.needed_bytes = phase.bytes.device;
      plan_.needed_phase = phase.name;
    }
  plan_.peak_phase = std::string(name_of(trace_.memory.peak_phase));
  if (trace_.memory.peak_segment >= 0)
    plan_.peak_segment = trace_.segments.at(static_cast<size_t>(trace_.memory.peak_segment));
  plan_.curve = curve();
  plan_.fits = plan_.needed_bytes <= machine_.memory_bytes;
  return std::move(plan_);
}

}  // namespace

MemoryPlan plan_memory(const MachineProfile& machine, const DataDescription& data, int64_t validation_images,
                       const StepTrace& trace) {
  return MemoryComposer(machine, data, validation_images, trace).run();
}

CheckpointCopy planned_checkpoint_copy(const TrainOptions& options, DryRunDevice device) {
  return checkpoint_copy_of(options.checkpoints.copy, options.offload.on(device == DryRunDevice::kCuda));
}

int64_t communication_bytes(const MachineProfile& machine, int64_t gpus) {
  return machine.device == DryRunDevice::kCuda && gpus > 1 ? kNcclBytes : 0;
}

}  // namespace kiln
