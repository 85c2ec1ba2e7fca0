// A plan from a trace: memory by phase and kind, time, scaling, advice.
#include "plan/plan.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "core/error.h"
#include "core/tensors.h"
#include "data/feature_store.h"
#include "data/image_dataset.h"
#include "extract/image_batches.h"
#include "plan/advice.h"
#include "plan/device_memory.h"
#include "plan/outlook.h"
#include "plan/rank_walk.h"
#include "train/checkpoint_saver.h"
#include "train/training_data.h"

namespace kiln {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kNcclBytes = 384 * kMiB;      // of a communicator's channels, outside the allocator
constexpr int64_t kHostProcessBytes = 1 << 30;  // a process with LibTorch's CUDA libraries and a context

bool is_store(const TrainOptions& options) { return fs::exists(fs::path(options.data) / "store.json"); }
bool is_synthetic(const TrainOptions& options) { return options.data.empty() || options.data == "synthetic"; }
bool encodes_images(const TrainOptions& options) {
  return !is_synthetic(options) && !is_store(options) && options.autoencoder != "pixels";
}
// One that the run loads: to encode images, or to decode the samples of a store that one has made.
bool has_autoencoder(const TrainOptions& options) {
  if (is_store(options)) return !decoder_path(options, read_store_info(options.data)).empty();
  return !options.autoencoder.empty() && options.autoencoder != "pixels";
}

std::string autoencoder_path(const TrainOptions& options) {
  return is_store(options) ? decoder_path(options, read_store_info(options.data)) : options.autoencoder;
}
// Its own where it lies here, else KL-f8's.
AutoencoderKlConfig autoencoder_config(const TrainOptions& options, const DataShape& data) {
  const std::string path = autoencoder_path(options);
  if (fs::exists(path)) return read_autoencoder_kl_config(path);
  return {.latent_channels = data.channels};
}
// Of images that it encodes.
DataShape latent_shape(const TrainOptions& options) {
  if (!encodes_images(options) || !fs::exists(options.autoencoder)) return synthetic_shape(options);
  const AutoencoderKl autoencoder(read_autoencoder_kl_config(options.autoencoder), {.device = at::kMeta});
  check_image_size(autoencoder, options.image_size);
  const int64_t side = options.image_size / autoencoder.downsample;
  return {.channels = autoencoder.latent_channels, .height = side, .width = side};
}

// `train` knows neither missing data nor missing folders; a plan needs none.
void check_training(const PlanOptions& options) {
  TrainOptions train = options.train;
  if (train.data.empty()) train.data = "synthetic";
  if (train.out.empty()) train.out = "planned";
  if (train.offload_optimizer == "nvme" || train.offload_params == "nvme") train.nvme_path = ".";
  validate(train);
}

class Composer {
 public:
  Composer(Plan& plan, const StepTrace& trace)
      : plan_(plan),
        trace_(trace),
        options_(rank_options(plan.options)),
        sharding_(sharding_of(plan.options.train, plan.options.gpus, plan.machine)),
        cuda_(plan.machine.device == DryRunDevice::kCuda),
        communication_(communication_bytes(plan.machine, plan.options.gpus)) {}

  void memory();
  int64_t checkpoint_copy_bytes() const;
  void time();

 private:
  struct DevicePeaks {
    DeviceTimeline::Peak load, first, steady, validation, sampling, encoding;
    bool out_of_memory = false;

    int64_t reserved_bytes() const {
      return std::max({load.reserved_bytes, first.reserved_bytes, steady.reserved_bytes,
                       validation.reserved_bytes, sampling.reserved_bytes, encoding.reserved_bytes});
    }
    int64_t live_bytes() const {
      return std::max({load.live_bytes, first.live_bytes, steady.live_bytes, validation.live_bytes,
                       sampling.live_bytes, encoding.live_bytes});
    }
  };
  DevicePeaks play(int64_t capacity) const;
  DevicePeaks play_within_memory() const;
  void trace_phases();
  void add_phase(const std::string& name, const DeviceTimeline::Peak& peak, int64_t host);
  void kinds(const DeviceTimeline::Peak& steady);
  bool validates() const { return !options_.validation_data.empty(); }
  int64_t loader_bytes() const;
  MemoryCurve curve() const;

  Plan& plan_;
  const StepTrace& trace_;
  const TrainOptions options_;
  const Sharding sharding_;
  const bool cuda_;
  const int64_t communication_;
  DeviceEvents load_, validation_, sampling_;
  AutoencoderEvents autoencoder_;
};

void Composer::trace_phases() {
  const DryRunDevice device = plan_.machine.device;
  const TrainOptions& all = plan_.options.train;  // all ranks'
  const auto group = dry_group(sharding_.gpus, sharding_.ranks_per_node);
  load_ = trace_load(all, plan_.data, device, group);
  // Tables of the objective, made at the first step, stay.
  const int64_t tables = trace_.memory.persistent_bytes - left_bytes(load_);
  if (tables > 0) load_.push_back({.id = (uint64_t{1} << 47), .bytes = tables});
  if (validates()) validation_ = trace_validation(all, plan_.data, device, group);
  if (all.sample_every > 0) sampling_ = trace_sample_grid(all, plan_.data, device, group);
  if (has_autoencoder(all))
    autoencoder_ =
        trace_autoencoder(autoencoder_config(all, plan_.data), options_, plan_.data, device, sharding_.gpus);
}

Composer::DevicePeaks Composer::play(int64_t capacity) const {
  DeviceTimeline timeline(cuda_, capacity);
  DevicePeaks peaks;
  const DeviceTimeline::Peak autoencoder = timeline.play(autoencoder_.load);
  peaks.load = timeline.play(load_);
  peaks.load.live_bytes = std::max(peaks.load.live_bytes, autoencoder.live_bytes);
  if (encodes_images(options_)) peaks.encoding = timeline.play(autoencoder_.encode);
  timeline.play({{.id = 0, .bytes = plan_.machine.workspace_bytes}});
  peaks.first = timeline.play_step(trace_.memory.events);
  peaks.steady = timeline.play_step(trace_.memory.events);
  if (validates()) peaks.validation = timeline.play(validation_);
  if (options_.sample_every > 0) {
    peaks.sampling = timeline.play(sampling_);
    const DeviceTimeline::Peak decoding = timeline.play(autoencoder_.decode);
    peaks.sampling.live_bytes = std::max(peaks.sampling.live_bytes, decoding.live_bytes);
    peaks.sampling.reserved_bytes = std::max(peaks.sampling.reserved_bytes, decoding.reserved_bytes);
  }
  peaks.out_of_memory = timeline.out_of_memory();
  return peaks;
}

// The allocator gives back what it has cached before it runs out: a run fits when its allocations can all be
// served within the memory that there is, however much more they would reserve where there is more. For one
// that does not fit: what it takes in the least memory that would do.
Composer::DevicePeaks Composer::play_within_memory() const {
  const DevicePeaks ample = play(0);
  const int64_t memory = plan_.machine.memory_bytes - plan_.machine.context_bytes - communication_;
  if (!cuda_ || ample.reserved_bytes() <= memory) return ample;
  constexpr int64_t kPrecision = 16 * kMiB;
  int64_t too_little = ample.live_bytes() - 1, enough = ample.reserved_bytes();
  DevicePeaks least = ample;
  const auto try_with = [&](int64_t capacity) {
    const DevicePeaks peaks = play(capacity);
    if (peaks.out_of_memory) {
      too_little = std::max(too_little, capacity);
    } else {
      enough = capacity;
      least = peaks;
    }
    return !peaks.out_of_memory;
  };
  if (memory > too_little && try_with(memory)) return least;
  while (enough - too_little > kPrecision) try_with(too_little + (enough - too_little) / 2);
  return least;
}

// Batches that wait, the one in use and the one being drawn.
int64_t Composer::loader_bytes() const {
  const DataShape& data = plan_.data;
  const int64_t latent = data.channels * data.height * data.width;
  const int64_t x_0 = encodes_images(options_) ? 3 * options_.image_size * options_.image_size : latent;
  return (options_.prefetch + 2) * plan_.rank_batch * (4 * (x_0 + latent) + 24);
}

void Composer::add_phase(const std::string& name, const DeviceTimeline::Peak& peak, int64_t host) {
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

void Composer::kinds(const DeviceTimeline::Peak& steady) {
  auto& by_kind = plan_.by_kind;
  for (const auto& [kind, bytes] : trace_.memory.peak_by_kind) by_kind[std::string(name_of(kind))] += bytes;
  by_kind["matmul"] += plan_.machine.workspace_bytes;
  by_kind[std::string(name_of(MemoryKind::kAutoencoder))] = left_bytes(autoencoder_.load);
  plan_.peak_bytes = 0;
  for (const auto& [name, bytes] : by_kind) plan_.peak_bytes += bytes;
  plan_.overhead = {{"context", plan_.machine.context_bytes},
                    {"communication", communication_},
                    {"allocator", cuda_ ? steady.reserved_bytes - plan_.peak_bytes : 0}};
  for (auto* map : {&plan_.by_kind, &plan_.overhead})
    std::erase_if(*map, [](const auto& entry) { return entry.second == 0; });
}

// Of host memory: a rank's share of weights, averages and moments.
int64_t Composer::checkpoint_copy_bytes() const {
  const Placement placement = sharding_.offload_optimizer == "none" ? Placement::kDevice : Placement::kHost;
  if (checkpoint_copy_of(options_.checkpoint_copy, cuda_ ? at::kCUDA : at::kCPU, placement) !=
      CheckpointCopy::kMemory)
    return 0;
  const auto num_moments =
      static_cast<int64_t>(make_optimizer(optimizer_config_of(options_))->moment_names().size());
  const auto num_emas = static_cast<int64_t>(options_.ema_decay.size());
  return 4 * trace_.num_weights * (1 + num_emas + num_moments) / sharding_.gpus;
}

// Of the step, over what is there beside the training state.
MemoryCurve Composer::curve() const {
  if (autoencoder_.load.empty()) return memory_curve(trace_.memory);
  StepMemory memory = trace_.memory;
  memory.persistent[MemoryKind::kAutoencoder] = left_bytes(autoencoder_.load);
  return memory_curve(memory);
}

void Composer::memory() {
  trace_phases();
  const DevicePeaks peaks = play_within_memory();
  const int64_t process = cuda_ ? kHostProcessBytes : 0, stepping = process + loader_bytes();
  add_phase("load", peaks.load, process);
  if (encodes_images(options_)) add_phase("extract", peaks.encoding, stepping);
  add_phase("first step", peaks.first, stepping);
  add_phase("steady step", peaks.steady, stepping);
  if (validates()) add_phase("validation", peaks.validation, stepping);
  if (options_.sample_every > 0) add_phase("validation sampling", peaks.sampling, stepping);
  const DeviceTimeline::Peak idle{
      .live_bytes = trace_.memory.persistent_bytes + plan_.machine.workspace_bytes,
      .reserved_bytes =
          cuda_ ? peaks.steady.reserved_bytes : left_bytes(autoencoder_.load) + left_bytes(load_)};
  const int64_t copy = checkpoint_copy_bytes();
  DeviceTimeline::Peak saving = idle;
  if (!cuda_ && copy > 0) {  // written while the run goes on
    for (const DeviceTimeline::Peak& peak : {peaks.steady, peaks.validation, peaks.sampling}) {
      saving.live_bytes = std::max(saving.live_bytes, peak.live_bytes);
      saving.reserved_bytes = std::max(saving.reserved_bytes, peak.reserved_bytes);
    }
    saving.live_bytes += copy;
  }
  add_phase("checkpoint", saving, stepping + copy);
  add_phase("resume", {.live_bytes = idle.live_bytes, .reserved_bytes = peaks.load.reserved_bytes}, process);
  kinds(peaks.steady);
  if (has_autoencoder(options_))
    plan_.notes.push_back(fmt::format(
        "workspaces of the autoencoder's convolutions{}",
        fs::exists(autoencoder_path(options_)) ? "" : "; its architecture is taken to be KL-f8's"));
  if (encodes_images(options_))
    plan_.notes.push_back("the time that encoding the images takes in every step");

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

void Composer::time() {
  const StepTime time = time_step(trace_, plan_.machine, sharding_);
  plan_.step_s = time.seconds;
  plan_.phase_s = time.by_phase;
  plan_.communication_s = time.communication_s;
  plan_.images_per_s = static_cast<double>(plan_.options.train.global_batch) / time.seconds;
  const auto peak = plan_.machine.peak_flops.find(parse_compute_dtype(options_.compute_dtype));
  if (peak != plan_.machine.peak_flops.end())
    plan_.peak_share =
        trace_.flops_per_image * plan_.images_per_s / static_cast<double>(sharding_.gpus) / peak->second;
}

}  // namespace

TrainOptions rank_options(const PlanOptions& options) {
  TrainOptions rank = options.train;
  rank.global_batch /= options.gpus;
  rank.micro_batch = std::min(rank.micro_batch, rank.global_batch);
  return rank;
}

DataShape planned_shape(const TrainOptions& options) {
  if (is_synthetic(options)) return synthetic_shape(options);
  if (is_store(options)) {
    const StoreInfo info = read_store_info(options.data);
    if (info.image_size != options.image_size)
      fail("plan", "--image-size {} does not fit the store {} of {}-pixel images: give --image-size {}",
           options.image_size, options.data, info.image_size, info.image_size);
    const int64_t classes = static_cast<int64_t>(info.class_names.size());
    return {.channels = info.channels,
            .height = info.height,
            .width = info.width,
            .num_classes = classes > 0 ? std::max(classes, options.num_classes) : 0};
  }
  if (!fs::exists(options.data))
    fail("plan",
         "--data {} does not exist: give a store made by kiln extract, images with --autoencoder, or leave "
         "it out",
         options.data);
  if (options.autoencoder.empty())
    fail("plan",
         "--data {} is not a feature store: run kiln extract, or give --autoencoder PATH (or pixels) to "
         "encode while training",
         options.data);
  DataShape shape = latent_shape(options);
  const int64_t classes = static_cast<int64_t>(ImageDataset::open(options.data)->class_names().size());
  shape.num_classes = classes > 0 ? std::max(classes, options.num_classes) : 0;
  return shape;
}

Plan compose_plan(const PlanOptions& options, const MachineProfile& machine, const DataShape& data,
                  const StepTrace& trace) {
  const Sharding sharding = sharding_of(options.train, options.gpus, machine);
  if (!is_of(trace, sharding)) return compose_plan(options, machine, data, trace_of_rank(trace, sharding));
  Plan plan;
  plan.options = options;
  plan.machine = machine;
  plan.data = data;
  plan.num_weights = trace.num_weights;
  plan.rank_batch = options.train.global_batch / options.gpus;
  plan.micro_batch =
      options.train.micro_batch > 0 ? std::min(options.train.micro_batch, plan.rank_batch) : plan.rank_batch;
  plan.num_micro_steps = (plan.rank_batch + plan.micro_batch - 1) / plan.micro_batch;
  Composer composer(plan, trace);
  composer.memory();
  composer.time();
  add_outlook(plan, trace);
  add_advice(plan, trace);
  return plan;
}

int64_t autoencoder_bytes(const TrainOptions& options, const DataShape& data, DryRunDevice device) {
  if (!has_autoencoder(options)) return 0;
  return left_bytes(trace_autoencoder(autoencoder_config(options, data), options, data, device, 1).load);
}

int64_t communication_bytes(const MachineProfile& machine, int64_t gpus) {
  return machine.device == DryRunDevice::kCuda && gpus > 1 ? kNcclBytes : 0;
}

MachineProfile planned_machine(const PlanOptions& options) {
  MachineProfile machine = find_profile(options.gpu);
  return options.train.tf32 ? with_tf32(std::move(machine)) : machine;
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
  if (options.train.micro_batch > batch / options.gpus)
    fail("plan", "--micro-batch {} is more than the {} images that each of {} GPUs has of --global-batch {}",
         options.train.micro_batch, batch / options.gpus, options.gpus, batch);
  check_dtype(machine, parse_compute_dtype(options.train.compute_dtype));
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
