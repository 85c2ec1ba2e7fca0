#include "plan/fit/machine_fit.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "models/registry.h"
#include "plan/memory/segment_costs.h"
#include "plan/run/make_plan.h"
#include "plan/trace/planned_data.h"
#include "train/memory_choices.h"

namespace kiln {

namespace {

constexpr int64_t kBudgetParts = 512;  // a budget is used to this precision

// A folder for the state on a disk, which training wants to exist: the one that the run's folder is in.
std::string existing_folder_beside(const std::string& out) {
  const std::filesystem::path parent = std::filesystem::path(out).parent_path();
  std::error_code none;
  return std::filesystem::is_directory(parent, none) ? parent.string() : ".";
}

}  // namespace

int64_t MachineFit::rows_of_rank(const TrainOptions& options) const {
  return (options.global_batch + world_size_ - 1) / world_size_;
}

Plan MachineFit::plan(TrainOptions options) const {
  options.global_batch = rows_of_rank(options) * world_size_;
  return plan_data({.train = options, .gpu = machine_->name, .gpus = world_size_},
                   options.compute.tf32 ? with_tf32(*machine_) : *machine_, planned_shape(options));
}

int64_t MachineFit::needed(const Plan& plan) const {
  if (machine_->device == DryRunDevice::kCuda) return plan.needed_bytes;
  int64_t live = 0;
  for (const PhasePlan& phase : plan.phases) live = std::max(live, phase.live_bytes);
  return plan.needed_bytes - machine_->context_bytes + process_.bytes +
         static_cast<int64_t>(process_.share * static_cast<double>(live));
}

// What a plan adds to the live bytes of its step (rounding, fragmentation, other phases, the process) shows
// once it is planned. The most live bytes whose plan fits are expected where the first plan's excess is gone,
// which on a CPU is exact; what lies above that is found by bisection.
std::optional<FittedChoice> MachineFit::choose(TrainOptions options) const {
  const DataShape data = planned_shape(options);
  const StepCosts costs = step_costs(options, data, machine_->device, world_size_);
  const auto denoiser = build_denoiser(
      options.model.name,
      denoiser_config_of(options, data, *make_objective(objective_config_of(options.objective))),
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

std::optional<FittedChoice> MachineFit::choose_micro_batch(TrainOptions options) const {
  std::optional<FittedChoice> best;
  const int64_t rows = rows_of_rank(options);
  for (int64_t images = rows; images >= 1; images = images == 1 ? 0 : (images + 1) / 2) {
    options.micro_batch = images < rows ? images : 0;
    std::optional<FittedChoice> fitted = choose(options);
    if (!fitted) continue;
    const bool keeps_all =
        fitted->options.memory.recompute.is_none() && fitted->options.memory.offload_activations.is_none();
    if (!best || fitted->plan.step_s < best->plan.step_s) best = std::move(fitted);
    if (keeps_all) break;  // smaller passes only take longer
  }
  return best;
}

std::optional<TrainOptions> MachineFit::nearest(const TrainOptions& options) const {
  TrainOptions smaller = options;
  for (const CheckpointCopy copy : {options.checkpoints.copy, CheckpointCopy::kPageCache}) {
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
  const DataShape data = planned_shape(options);
  const StepCosts costs = step_costs(options, data, machine_->device, world_size_);
  const auto denoiser = build_denoiser(
      options.model.name,
      denoiser_config_of(options, data, *make_objective(objective_config_of(options.objective))),
      {.device = at::kMeta});
  set_memory_choices(options.memory, fit_memory(costs, smallest_peak_bytes(costs)), *denoiser);
  return needed(plan(options));
}

}  // namespace kiln
