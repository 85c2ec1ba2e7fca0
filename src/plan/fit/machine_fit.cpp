#include "plan/fit/machine_fit.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "models/registry.h"
#include "parallel/machine.h"
#include "plan/memory/segment_costs.h"
#include "plan/price/attention_engine.h"
#include "plan/price/step_timing.h"
#include "train/memory_choices.h"

namespace kiln {

namespace {

constexpr int64_t kBudgetParts = 512;  // the search ends within this part of a budget

// A process that gives freed memory back holds more than its tensors, the loader's arrays and what is
// resident after a first small step: buffers of logs, checkpoints and reports, kernels of other shapes, pages
// that tensors use in part. These are twice the most that was measured over widths, batches, dtypes and
// threads (benchmarks/results/budget_*).
constexpr int64_t kRunBytes = 48 << 20;
constexpr double kAllocatorShare = 0.01;
// A process that keeps freed memory comes to hold up to a third more than its tensors (same measurements). It
// keeps it only if there is room for as much again.
constexpr double kKeptShare = 1;

// Returns a folder for the state on a disk, which must exist: the parent of the run's folder, or ".".
std::string existing_folder_beside(const std::string& out) {
  const std::filesystem::path parent = std::filesystem::path(out).parent_path();
  std::error_code none;
  return std::filesystem::is_directory(parent, none) ? parent.string() : ".";
}

bool keeps_all(const TrainOptions& options) {
  return options.memory.recompute.is_none() && options.memory.offload_activations.is_none();
}

}  // namespace

ProcessMemory frugal_process(const TrainOptions& options) {
  TrainOptions tiny;
  tiny.model.name = denoiser_families().front().name;
  tiny.model.hidden_size = 128;
  tiny.model.num_heads = 2;
  tiny.model.depth = 1;
  tiny.model.patch_size = 4;
  tiny.model.num_classes = 10;
  tiny.data.image_size = 128;
  tiny.global_batch = 8;
  tiny.compute.dtype = options.compute.dtype;
  time_steps(tiny, at::kCPU, {.plain = 1});
  return {.bytes = resident_bytes() + kRunBytes, .share = kAllocatorShare};
}

ProcessMemory keeping_process(const MachineProfile& machine) {
  return {.bytes = std::max(resident_bytes(), machine.context_bytes), .share = kKeptShare};
}

int64_t MachineFit::rows_of_rank(const TrainOptions& options) const {
  return (options.global_batch + world_size_ - 1) / world_size_;
}

Plan MachineFit::plan(TrainOptions options) const {
  options.global_batch = rows_of_rank(options) * world_size_;
  return plan_data({.train = options, .gpu = machine_->name, .gpus = world_size_},
                   options.compute.tf32 ? with_tf32(*machine_) : *machine_, *data_);
}

int64_t MachineFit::needed(const Plan& plan) const {
  if (machine_->device == DryRunDevice::kCuda) return plan.needed_bytes;
  int64_t live = 0;
  for (const PhasePlan& phase : plan.phases) live = std::max(live, phase.live_bytes);
  return plan.needed_bytes - machine_->context_bytes + process_.bytes +
         static_cast<int64_t>(process_.share * static_cast<double>(live));
}

// A plan needs more than the live bytes of its step (rounding, fragmentation, other phases, the process), and
// only planning shows how much. So the excess of a first plan is taken off its live bytes, which is exact on
// a CPU, and bisection finds whatever fits above that.
std::optional<FittedChoice> MachineFit::choose_segments(TrainOptions options) const {
  const StepCosts costs =
      step_costs(traced_options(options, *machine_), data_->shape, machine_->device, world_size_);
  const auto denoiser = build_denoiser(
      options.model.name,
      denoiser_config_of(options, data_->shape, *make_objective(objective_config_of(options.objective))),
      {.device = at::kMeta});
  std::optional<FittedChoice> best;
  int64_t fits = 0, too_much = 0;  // live bytes
  // Plans the choices within `live_budget`. Returns by how much that is more than the budget.
  const auto try_within = [&](int64_t live_budget) {
    const std::vector<MemoryChoice> choices = fit_memory(costs, live_budget);
    set_memory_choices(options.memory, choices, *denoiser);
    Plan fitted = plan(options);
    const int64_t excess = needed(fitted) - budget_;
    if (excess > 0) {
      too_much = peak_bytes(costs, choices);
    } else {
      fits = live_budget;
      best = FittedChoice{options, std::move(fitted)};
    }
    return excess;
  };
  const int64_t least = smallest_peak_bytes(costs);
  if (least > budget_) return std::nullopt;
  const int64_t excess = try_within(budget_);
  if (best) return best;
  const int64_t expected = too_much - std::llround(static_cast<double>(excess) / (1 + process_.share)) - 1;
  if (expected >= least) try_within(expected);
  if (!best && too_much > least) try_within(least);
  if (!best) return std::nullopt;
  while (too_much - fits > budget_ / kBudgetParts) try_within(fits + (too_much - fits) / 2);
  return best;
}

std::optional<FittedChoice> MachineFit::choose(TrainOptions options) const {
  std::optional<FittedChoice> best = choose_segments(options);
  if (!options.compute.untried_gpu.has(Untried::kKeepGelu) || (best && keeps_all(best->options))) return best;
  options.compute.untried_gpu.leave_out(Untried::kKeepGelu);
  std::optional<FittedChoice> leaner = choose_segments(options);
  return !best || (leaner && leaner->plan.step_s < best->plan.step_s) ? leaner : best;
}

std::optional<FittedChoice> MachineFit::choose_micro_batch(TrainOptions options) const {
  std::optional<FittedChoice> best;
  const int64_t rows = rows_of_rank(options);
  for (int64_t images = rows; images >= 1; images = images == 1 ? 0 : (images + 1) / 2) {
    options.micro_batch = images < rows ? images : 0;
    std::optional<FittedChoice> fitted = choose(options);
    if (!fitted) continue;
    const bool is_whole = keeps_all(fitted->options);
    if (!best || fitted->plan.step_s < best->plan.step_s) best = std::move(fitted);
    if (is_whole) break;  // smaller passes only take longer
  }
  return best;
}

std::optional<TrainOptions> MachineFit::nearest(const TrainOptions& options) const {
  std::vector<CheckpointCopy> copies = {options.checkpoints.copy};
  if (planned_checkpoint_copy(options, machine_->device) == CheckpointCopy::kMemory)
    copies.push_back(CheckpointCopy::kPageCache);
  TrainOptions smaller = options;
  for (const CheckpointCopy copy : copies) {
    smaller.checkpoints.copy = copy;
    smaller.micro_batch = options.micro_batch > 0 ? options.micro_batch : rows_of_rank(options);
    for (; smaller.micro_batch >= 1; smaller.micro_batch /= 2)
      if (const auto fitted = choose(smaller)) {
        TrainOptions nearest = fitted->options;
        if (nearest.micro_batch == nearest.global_batch) nearest.micro_batch = options.micro_batch;
        return nearest;
      }
  }
  return std::nullopt;
}

std::optional<TrainOptions> MachineFit::nearest_offloaded(const TrainOptions& options) const {
  const bool on_gpu = machine_->device == DryRunDevice::kCuda;
  for (const Placement place : {Placement::kHost, Placement::kNvme}) {
    const bool is_further = place == Placement::kNvme
                                ? options.offload.optimizer != Placement::kNvme
                                : on_gpu && options.offload.optimizer == Placement::kDevice;
    if (!is_further) continue;
    TrainOptions offloaded = options;
    offloaded.offload.optimizer = place;
    if (place == Placement::kNvme && offloaded.offload.nvme.folder.empty())
      offloaded.offload.nvme.folder = existing_folder_beside(options.out);
    if (std::optional<TrainOptions> found = nearest(offloaded)) return found;
  }
  return std::nullopt;
}

int64_t MachineFit::least(TrainOptions options) const {
  options.micro_batch = 1;
  const StepCosts costs =
      step_costs(traced_options(options, *machine_), data_->shape, machine_->device, world_size_);
  const auto denoiser = build_denoiser(
      options.model.name,
      denoiser_config_of(options, data_->shape, *make_objective(objective_config_of(options.objective))),
      {.device = at::kMeta});
  set_memory_choices(options.memory, fit_memory(costs, smallest_peak_bytes(costs)), *denoiser);
  return needed(plan(options));
}

}  // namespace kiln
