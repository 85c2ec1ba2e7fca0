// Advice on what to change in a plan.
#include <fmt/ranges.h>

#include <cmath>

#include "core/files/file_system.h"
#include "core/units.h"
#include "plan/ranks/rank_step.h"
#include "plan/run/make_plan.h"
#include "run/option_values.h"
#include "train/checkpoint_files.h"
#include "train/setup.h"

namespace kiln {

namespace {

constexpr double kMuchMemory = 0.85;   // share of the device: fragmentation and other processes take the rest
constexpr double kHiddenShare = 0.10;  // share of a step that a bottleneck may cost unmentioned
constexpr double kRateMargin = 1.2;    // a disk or loader should be this much faster than the step
constexpr double kLrMargin = 4;
constexpr double kWorthwhile = 1.02;  // how many times as fast a step must become for memory that is free
constexpr double kMuchDisk = 0.5;     // share of what is free: data, pictures and other runs take the rest
// Assumption where --out does not say which disk it is: half of 1 TB, which many machines with a GPU have.
constexpr int64_t kUsuallyFree = int64_t{512} << 30;
constexpr int64_t kEnoughCheckpoints = 3;  // more are hardly ever gone back to

// Returns what to change, in the words of the reader's command line or file.
template <class T>
std::string change(const Plan& plan, const char* option, const T& value) {
  return plan.options.change(option, fmt::format("{}", value));
}

// Returns the needed share of the machine's memory. With another micro-batch it is an estimate.
double share_of_memory(const Plan& plan, int64_t micro_batch) {
  double of_passes = 0;  // what grows with the images of a pass
  for (const char* kind : {"batch", "activations", "recompute", "attention", "matmul", "temporaries"})
    if (const auto found = plan.by_kind.find(kind); found != plan.by_kind.end())
      of_passes += static_cast<double>(found->second);
  const double more = static_cast<double>(micro_batch) / static_cast<double>(plan.micro_batch) - 1;
  return (static_cast<double>(plan.needed_bytes) + more * of_passes) /
         static_cast<double>(plan.machine.memory_bytes);
}

void advise_size(const Plan& plan, std::vector<std::string>& advice) {
  const TrainOptions& train = plan.options.train;
  const nlohmann::json config =
      denoiser_config_of(train, plan.data, *make_objective(objective_config_of(train.objective)));
  if (const std::string line = unnamed_size(train.model, config); !line.empty()) advice.push_back(line);
}

void advise_batch(const Plan& plan, std::vector<std::string>& advice) {
  const TrainOptions& train = plan.options.train;
  if (train.micro_batch > plan.rank_batch)
    advice.push_back(
        fmt::format("--micro-batch {0} is more than the {1} images that each GPU has of a step: "
                    "they go in one pass, as with {2}",
                    train.micro_batch, plan.rank_batch, change(plan, "micro-batch", plan.rank_batch)));
  const int64_t multiple = std::max<int64_t>(8, plan.micro_batch / 8 * 8);
  const bool has_room = multiple < plan.micro_batch || share_of_memory(plan, multiple) <= kMuchMemory;
  if (plan.micro_batch % 8 != 0 && plan.rank_batch >= 8 && has_room)
    advice.push_back(fmt::format("micro-batch {} is not a multiple of 8, which matrix units work in: {}",
                                 plan.micro_batch, change(plan, "micro-batch", multiple)));
  const PublishedTraining published = published_run(train);
  if (published.global_batch == 0 || train.lora.is_on()) return;  // an adapter learns at rates of its own
  const bool is_published = published.steps > 0, is_small = train.global_batch < published.least_batch;
  if (is_small || (is_published && train.global_batch > published.global_batch))
    advice.push_back(fmt::format(
        "global batch {} is outside of what this model is known to train with ({}{} of {}; smaller gradients "
        "are noisier, larger ones cost more images for the same steps): {}",
        train.global_batch,
        published.least_batch > 0 ? fmt::format("guides say {} or more in all, ", published.least_batch) : "",
        published.global_batch, published.source,
        change(plan, "global-batch", is_small ? published.least_batch : published.global_batch)));
  // With optimizers that divide by the gradient's size, noise makes the rate go with the root of the batch.
  const double suits = published.lr * std::sqrt(static_cast<double>(train.global_batch) /
                                                static_cast<double>(published.global_batch));
  if (train.lr.peak > kLrMargin * suits || train.lr.peak < suits / kLrMargin)
    advice.push_back(fmt::format(
        "learning rate {:g} does not suit global batch {} (published: {:.3g} at {}, {}; it goes with "
        "the root of the batch): {}",
        train.lr.peak, train.global_batch, published.lr, published.global_batch, published.source,
        change(plan, "lr", fmt::format("{:.1g}", suits))));
}

// Returns the command of a search. It leaves open what the search itself chooses.
std::string search_command(const Plan& plan) {
  TrainOptions open = plan.options.train;
  const TrainOptions defaults;
  open.micro_batch = defaults.micro_batch;
  if (open.compute.master_dtype == defaults.compute.master_dtype && !open.compute.emulate_fp8)
    open.compute.dtype = defaults.compute.dtype;  // else one of these two needs the given dtype
  open.memory.recompute = defaults.memory.recompute;
  open.zero.stage = defaults.zero.stage;
  open.offload.optimizer = defaults.offload.optimizer;
  const std::string train = command_line(open);
  const bool has_spaces = plan.machine.name.find(' ') != std::string::npos;  // a calibrated profile
  const auto given = [](const char* option, const auto& value) {
    return value == std::remove_cvref_t<decltype(value)>() ? "" : fmt::format(" --{} {}", option, value);
  };
  return fmt::format("kiln plan --search --gpu {0}{1}{0}{2} --gpus {3}{4}{5}{6}", has_spaces ? "'" : "",
                     plan.machine.name, given("gpu-memory", plan.options.gpu_memory), plan.options.gpus,
                     given("gpus-per-node", plan.options.gpus_per_node),
                     given("network-gbit", plan.options.network_gbit),
                     train.substr(std::string("kiln train").size()));
}

void advise_dtype(const Plan& plan, std::vector<std::string>& advice) {
  const MachineProfile& machine = plan.machine;
  const TrainOptions& train = plan.options.train;
  if (machine.device != DryRunDevice::kCuda || train.compute.dtype != at::kFloat) return;
  const bool has_bf16 = machine.peak_flops.contains(at::kBFloat16);
  const double half = machine.peak_flops.at(has_bf16 ? at::kBFloat16 : at::kHalf),
               single = machine.peak_flops.at(at::kFloat);
  if (half <= single) return;
  advice.push_back(fmt::format(
      "f32 multiplies at {:.0f} TFLOP/s, half precision at {:.0f}, with half the bytes of activations: "
      "{}{}",
      single / 1e12, half / 1e12, change(plan, "compute-dtype", has_bf16 ? "bf16" : "fp16"),
      machine.tf32_flops > single && !train.compute.tf32 ? ", or --tf32 for f32's range" : ""));
}

// Returns options that need less memory than those that are set, the least change first.
std::string less_memory(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  std::vector<std::string> ways;
  if (plan.micro_batch > 1) ways.push_back(change(plan, "micro-batch", plan.micro_batch / 2));
  if (!train.memory.recompute.is_all()) ways.push_back(change(plan, "recompute", "all"));
  if (plan.options.gpus > 1 && train.zero.stage < 3)
    ways.push_back(change(plan, "zero-stage", train.zero.stage + 1));
  else if (train.offload.optimizer == Placement::kDevice)
    ways.push_back(change(plan, "offload-optimizer", "cpu"));
  if (ways.empty()) return "a smaller model, or a GPU with more";
  return fmt::format("{}", fmt::join(ways, " or "));
}

// Advises to let the run choose its passes and what they recompute, if passes are what does not fit.
void advise_budget(const Plan& plan, const StepTrace& trace, std::vector<std::string>& advice) {
  const MemoryOptions& memory = plan.options.train.memory;
  const int64_t of_pass = trace.memory.peak_bytes - trace.memory.persistent_bytes,
                rest = plan.needed_bytes - of_pass;
  if (!plan.needed_phase.ends_with("step") || rest >= plan.machine.memory_bytes) return;
  if (memory.budget.is_given() || (plan.micro_batch == 1 && memory.recompute.is_all())) return;
  advice.push_back(fmt::format(
      "a pass takes {:.1f} GiB, all else {:.1f} GiB: {} {} chooses smaller passes and what they recompute",
      gib(of_pass), gib(rest), change(plan, "micro-batch", -1), change(plan, "memory-budget", "auto")));
}

// Advises what needs less memory if little is left, and which stage or search helps if the run does not fit.
void advise_memory(const Plan& plan, const StepTrace& trace, std::vector<std::string>& advice) {
  const double share = share_of_memory(plan, plan.micro_batch);
  if (plan.fits && share > kMuchMemory)
    advice.push_back(
        fmt::format("{:.0f} % of the memory is used, which leaves little for other programs and "
                    "fragmentation: {}",
                    100 * share, less_memory(plan)));
  if (plan.fits || !plan.machine.runs_kiln) return;
  advise_budget(plan, trace, advice);
  const int64_t gpus = std::max<int64_t>(2, plan.options.gpus);
  for (int64_t stage = plan.options.train.zero.stage + 1; stage <= 3; ++stage) {
    Sharding divided = sharding_of(plan.options.train, gpus, plan.machine);
    divided.zero_stage = stage;
    if (plan.options.train.global_batch % gpus != 0) break;
    const int64_t needed = plan.needed_bytes - trace.memory.peak_bytes +
                           trace_of_rank(trace, divided, /*has_checkpoint_part=*/false).memory.peak_bytes;
    if (needed > plan.machine.memory_bytes) continue;
    advice.push_back(fmt::format(
        "{} keeps all training state on every GPU; divided among {} it fits in {:.1f} of {:.1f} GiB each: "
        "{} {}",
        plan.options.train.zero.stage == 0 ? "plain data parallel"
                                           : fmt::format("stage {}", plan.options.train.zero.stage),
        gpus, gib(needed), gib(plan.machine.memory_bytes), change(plan, "gpus", gpus),
        change(plan, "zero-stage", stage)));
    if (plan.options.gpus > 1) return;
    break;  // then also say what a single GPU can do
  }
  advice.push_back("the run does not fit; this command finds what does, and how fast it is: " +
                   search_command(plan));
}

// Returns the options for twice the images of a step, in passes of as many as now.
std::string larger_steps(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  const std::string larger = change(plan, "global-batch", 2 * train.global_batch);
  return train.micro_batch > 0 ? larger : larger + " " + change(plan, "micro-batch", plan.micro_batch);
}

// Returns ", --gpus 16 --zero-stage 1": the same step, with the update divided among more. Empty if the batch
// cannot be divided so.
std::string divided_further(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  const int64_t gpus = 2 * plan.options.gpus;
  if (train.global_batch % gpus != 0) return "";
  const std::string more = ", " + change(plan, "gpus", gpus);
  return train.zero.stage > 0 ? more : more + " " + change(plan, "zero-stage", 1);
}

// Returns what gives each GPU more images in one pass.
std::string more_images(const Plan& plan) {
  const TrainOptions& train = plan.options.train;
  if (train.micro_batch > 0) return "(a larger batch, in larger passes)";
  return change(plan, "global-batch", 2 * train.global_batch);
}

// Advises to keep few checkpoints where they take much of what is free on the disk that they go to.
void advise_checkpoints(const Plan& plan, std::vector<std::string>& advice) {
  if (plan.num_checkpoints <= kEnoughCheckpoints) return;
  const std::string& out = plan.options.train.out;
  const int64_t kept = plan.num_checkpoints * plan.checkpoint_bytes,
                room = out.empty() ? kUsuallyFree : available_bytes(existing_folder(out));
  if (gib(kept) <= kMuchDisk * gib(room)) return;
  const char* where = out.empty() ? "a usual disk has free (--out names yours)" : "are free where --out is";
  advice.push_back(fmt::format("{} checkpoints are kept, {} of the {} GiB that {}: {}", plan.num_checkpoints,
                               gib_text(kept), number_text(gib(room)), where,
                               change(plan, "keep-checkpoints", kEnoughCheckpoints)));
}

// Returns how long kiln extract takes for all pictures.
std::string extraction_text(const Plan& plan) {
  if (plan.extraction_days <= 0) return "";
  return fmt::format(" ({} for {} pictures)", duration_text(plan.extraction_days * kSecondsPerDay),
                     plan.samples.num_samples);
}

void advise_speed(const Plan& plan, std::vector<std::string>& advice) {
  const double update = plan.phase_s[static_cast<size_t>(StepPhase::kOptimizer)];
  if (plan.options.train.offload.optimizer != Placement::kDevice && update > kHiddenShare * plan.step_s)
    advice.push_back(
        fmt::format("the offloaded optimizer's update takes {:.0f} % of the step (host link {:.0f} GB/s): "
                    "fewer, larger steps {}{}, or {}, where that fits",
                    100 * update / plan.step_s, plan.machine.host_link_bytes_per_s / 1e9, larger_steps(plan),
                    divided_further(plan), change(plan, "offload-optimizer", "none")));
  // A short run sees fewer pictures than there are.
  const bool is_longer =
      plan.encoding_s * static_cast<double>(plan.steps) > plan.extraction_days * kSecondsPerDay;
  if (plan.encoding_s > kHiddenShare * plan.step_s && is_longer)
    advice.push_back(
        fmt::format("encoding {} takes {:.0f} % of every step: kiln extract does it once for all epochs{}, "
                    "and --data is then its store",
                    plan.caption_encoding_s == 0                ? "pictures"
                    : plan.encoding_s > plan.caption_encoding_s ? "pictures and captions"
                                                                : "captions",
                    100 * plan.encoding_s / plan.step_s, extraction_text(plan)));
  const double waiting = plan.phase_s[static_cast<size_t>(StepPhase::kCommunication)];
  if (waiting > kHiddenShare * plan.step_s)
    advice.push_back(fmt::format(
        "{:.0f} % of the step waits for the link between GPUs: more images per GPU and step {}{}",
        100 * waiting / plan.step_s, more_images(plan),
        plan.options.train.zero.stage > 0 && plan.options.train.offload.params == Placement::kDevice
            ? ", or " + change(plan, "zero-stage", plan.options.train.zero.stage - 1)
            : ""));
  const DataRate& rate = plan.data_rate;
  const bool are_pictures = plan.samples.reads_pictures;
  if (rate.disk_bytes_per_s > 0 && rate.bytes_per_s * kRateMargin > rate.disk_bytes_per_s)
    advice.push_back(fmt::format(
        "the disk ({:.2f} GB/s) will be the bottleneck: a node reads {:.2f} GB/s of {}: keep them in memory "
        "or on NVMe{}",
        rate.disk_bytes_per_s / 1e9, rate.bytes_per_s / 1e9, are_pictures ? "pictures" : "features",
        are_pictures ? "" : ", or extract with --dtype bf16"));
  if (rate.images_per_s * kRateMargin > rate.loader_images_per_s)
    advice.push_back(fmt::format(
        "the loader {} {:.0f} images/s, the step takes {:.0f}: --loader-threads {}{}",
        are_pictures ? "decodes" : "draws", rate.loader_images_per_s, rate.images_per_s,
        static_cast<int64_t>(std::ceil(kRateMargin * rate.images_per_s / rate.loader_images_per_s *
                                       static_cast<double>(plan.options.train.data.loader_threads))),
        are_pictures ? " on as many processors, or kiln extract, which decodes each picture once" : ""));
  const std::string& path = plan.options.train.data.path;
  if (plan.samples.is_network && !disk_of(plan.machine.disks, path))
    advice.push_back(
        fmt::format("--data is on {}, a network file system, whose speed the network and its other users "
                    "decide: kiln plan --calibrate --data {} measures it on the machine that trains",
                    plan.samples.file_system, path));
}

}  // namespace

void add_advice(Plan& plan, const StepTrace& trace) {
  if (!plan.machine.runs_kiln)
    plan.advice.push_back(fmt::format(
        "this build does not run on a {}: torch 2.11's CUDA 13 begins with Turing (compute capability 7.5)",
        plan.machine.name));
  advise_size(plan, plan.advice);
  advise_dtype(plan, plan.advice);
  advise_batch(plan, plan.advice);
  advise_memory(plan, trace, plan.advice);
  advise_speed(plan, plan.advice);
  advise_checkpoints(plan, plan.advice);
}

void compare_with_keeping_all(Plan& plan) {
  PlanOptions keeping = plan.options;
  MemoryOptions& memory = keeping.train.memory;
  if (!plan.fits || memory.budget.is_given() ||
      (memory.recompute.is_none() && memory.offload_activations.is_none()))
    return;
  memory.recompute = memory.offload_activations = {};
  keeping.has_scaling = false;
  const Plan all = make_plan(keeping);
  const double share = static_cast<double>(all.needed_bytes) / static_cast<double>(all.machine.memory_bytes);
  if (!all.fits || share > kMuchMemory || plan.step_s < kWorthwhile * all.step_s) return;
  std::vector<std::string> changes;
  if (!plan.options.train.memory.recompute.is_none()) changes.push_back(change(plan, "recompute", "none"));
  if (!plan.options.train.memory.offload_activations.is_none())
    changes.push_back(change(plan, "offload-activations", "none"));
  plan.advice.push_back(fmt::format(
      "keeping all activations takes {:.0f} % of the memory, and {} s a step instead of {}: {}", 100 * share,
      number_text(all.step_s, 3), number_text(plan.step_s, 3), fmt::join(changes, " ")));
}

}  // namespace kiln
