#include "plan/plan_memory.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "core/error.h"
#include "plan/phase_peaks.h"
#include "train/checkpoint_saver.h"

namespace kiln {

namespace {

constexpr int64_t kNcclBytes = 384 << 20;       // of a communicator's channels, outside the allocator
constexpr int64_t kHostProcessBytes = 1 << 30;  // a process with LibTorch's CUDA libraries and a context

class MemoryComposer {
 public:
  MemoryComposer(Plan& plan, const StepTrace& trace)
      : plan_(plan),
        trace_(trace),
        options_(plan.options.train),
        player_(plan, trace),
        cuda_(plan.machine.device == DryRunDevice::kCuda),
        communication_(communication_bytes(plan.machine, plan.options.gpus)) {}

  void run();

 private:
  void add_phases(const PhasePeaks& peaks);
  void add_phase(const std::string& name, const DeviceTimeline::Peak& peak, int64_t host);
  void add_kinds(const DeviceTimeline::Peak& steady);
  void add_notes();
  int64_t loader_bytes(int64_t batch, bool of_pictures) const;
  int64_t checkpoint_copy_bytes() const;
  MemoryCurve curve() const;

  Plan& plan_;
  const StepTrace& trace_;
  const TrainOptions& options_;
  const PhasePlayer player_;
  const bool cuda_;
  const int64_t communication_;
};

// Of batches of so many images: those that wait, the one in use and the one being drawn.
int64_t MemoryComposer::loader_bytes(int64_t batch, bool of_pictures) const {
  const DataShape& data = plan_.data;
  const int64_t latent = data.channels * data.height * data.width;
  const int64_t x_0 = of_pictures ? 3 * options_.image_size * options_.image_size : latent;
  return (options_.prefetch + 2) * batch * (4 * (x_0 + latent) + 24);
}

void MemoryComposer::add_phase(const std::string& name, const DeviceTimeline::Peak& peak, int64_t host) {
  Footprint bytes{.device = plan_.machine.context_bytes + communication_ + peak.reserved_bytes,
                  .host = host,
                  .pinned_host = trace_.offloaded.host + trace_.offloaded_activation_bytes,
                  .nvme = trace_.offloaded.disk};
  if (!cuda_) {  // one memory
    bytes.device += bytes.host + bytes.pinned_host;
    bytes.host = bytes.pinned_host = 0;
  }
  plan_.phases.push_back({.name = name, .live_bytes = peak.live_bytes, .bytes = bytes});
}

void MemoryComposer::add_kinds(const DeviceTimeline::Peak& steady) {
  auto& by_kind = plan_.by_kind;
  for (const auto& [kind, bytes] : trace_.memory.peak_by_kind) by_kind[std::string(name_of(kind))] += bytes;
  by_kind["matmul"] += plan_.machine.workspace_bytes;
  by_kind[std::string(name_of(MemoryKind::kAutoencoder))] = player_.autoencoder_bytes();
  plan_.peak_bytes = 0;
  for (const auto& [name, bytes] : by_kind) plan_.peak_bytes += bytes;
  plan_.overhead = {{"context", plan_.machine.context_bytes},
                    {"communication", communication_},
                    {"allocator", cuda_ ? steady.reserved_bytes - plan_.peak_bytes : 0}};
  for (auto* map : {&plan_.by_kind, &plan_.overhead})
    std::erase_if(*map, [](const auto& entry) { return entry.second == 0; });
}

// Of host memory: a rank's share of weights, averages and moments.
int64_t MemoryComposer::checkpoint_copy_bytes() const {
  const Placement placement = options_.offload_optimizer == "none" ? Placement::kDevice : Placement::kHost;
  if (checkpoint_copy_of(options_.checkpoint_copy, cuda_ ? at::kCUDA : at::kCPU, placement) !=
      CheckpointCopy::kMemory)
    return 0;
  const auto num_moments =
      static_cast<int64_t>(make_optimizer(optimizer_config_of(options_))->moment_names().size());
  const auto num_emas = static_cast<int64_t>(options_.ema_decay.size());
  return 4 * trace_.num_weights * (1 + num_emas + num_moments) / plan_.options.gpus;
}

// Of the step, over what is there beside the training state.
MemoryCurve MemoryComposer::curve() const {
  if (!player_.autoencoder()) return memory_curve(trace_.memory);
  StepMemory memory = trace_.memory;
  memory.persistent[MemoryKind::kAutoencoder] = player_.autoencoder_bytes();
  return memory_curve(memory);
}

void MemoryComposer::add_phases(const PhasePeaks& peaks) {
  const int64_t process = cuda_ ? kHostProcessBytes : 0,
                stepping = process + loader_bytes(plan_.rank_batch, encodes_images(options_)),
                validating = stepping + loader_bytes(rows_of_validation(options_, plan_.options.gpus),
                                                     encodes_validation_images(options_));
  add_phase("load", peaks.load, process);
  if (encodes_images(options_)) add_phase("extract", peaks.encoding, stepping);
  add_phase("first step", peaks.first, stepping);
  add_phase("steady step", peaks.steady, stepping);
  if (player_.validates()) add_phase("validation", peaks.validation, validating);
  if (player_.draws_samples()) add_phase("validation sampling", peaks.sampling, stepping);
  const DeviceTimeline::Peak idle{
      .live_bytes = trace_.memory.persistent_bytes + plan_.machine.workspace_bytes,
      .reserved_bytes =
          cuda_ ? peaks.steady.reserved_bytes : player_.autoencoder_bytes() + player_.left_by_load()};
  const int64_t copy = checkpoint_copy_bytes();
  DeviceTimeline::Peak saving = idle;
  if (!cuda_ && copy > 0) {  // written while the run goes on
    for (const DeviceTimeline::Peak& peak : {peaks.steady, peaks.validation, peaks.sampling}) {
      saving.live_bytes = std::max(saving.live_bytes, peak.live_bytes);
      saving.reserved_bytes = std::max(saving.reserved_bytes, peak.reserved_bytes);
    }
    saving.live_bytes += copy;
  }
  add_phase("checkpoint", saving, copy > 0 && player_.validates() ? validating + copy : stepping + copy);
  add_phase("resume", {.live_bytes = idle.live_bytes, .reserved_bytes = peaks.load.reserved_bytes}, process);
}

void MemoryComposer::add_notes() {
  if (player_.autoencoder())
    plan_.notes.push_back(
        fmt::format("workspaces of the autoencoder's convolutions{}",
                    player_.autoencoder()->is_here ? "" : "; its architecture is taken to be KL-f8's"));
  if (encodes_images(options_))
    plan_.notes.push_back("the time that encoding the images takes in every step");
}

void MemoryComposer::run() {
  const PhasePeaks peaks =
      player_.play_within(plan_.machine.memory_bytes - plan_.machine.context_bytes - communication_);
  add_phases(peaks);
  add_kinds(peaks.steady);
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
  plan_.fits = plan_.needed_bytes <= plan_.machine.memory_bytes;
}

}  // namespace

void add_memory(Plan& plan, const StepTrace& trace) { MemoryComposer(plan, trace).run(); }

int64_t communication_bytes(const MachineProfile& machine, int64_t gpus) {
  return machine.device == DryRunDevice::kCuda && gpus > 1 ? kNcclBytes : 0;
}

}  // namespace kiln
