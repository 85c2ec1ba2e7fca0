#include "plan/search_space.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "models/registry.h"
#include "plan/rank_walk.h"
#include "plan/segment_costs.h"
#include "plan/trace_family.h"
#include "plan/trace_parts.h"
#include "train/memory_choices.h"

namespace kiln {

namespace {

constexpr int64_t kMostGpus = 1024;
// Shares of the memory that mixtures of keeping and recomputing aim at: what fragmentation leaves, and what
// the advice calls comfortable.
constexpr double kMixtureShares[] = {0.95, 0.85};

class SpaceBuilder {
 public:
  SpaceBuilder(const SearchOptions& search, const MachineProfile& machine, const DataShape& data)
      : search_(search), machine_(machine), data_(data) {}

  std::vector<Configuration> run() {
    for (const std::string& dtype : dtypes()) {
      TrainOptions options = search_.plan.train;
      options.compute_dtype = dtype;
      autoencoder_ = autoencoder_bytes(options, data_, machine_.device);
      for (int64_t gpus : gpu_counts()) {
        const int64_t rank_batch = search_.plan.train.global_batch / gpus;
        for (int64_t micro_batch : micro_batches(rank_batch)) {
          present_ = {.gpus = gpus, .micro_batch = micro_batch, .compute_dtype = dtype};
          num_passes_ = (rank_batch + micro_batch - 1) / micro_batch;
          add_pass();
        }
      }
    }
    return std::move(configurations_);
  }

 private:
  bool is_fixed(const char* option) const { return search_.fixed.contains(option); }

  std::vector<std::string> dtypes() const {
    if (is_fixed("compute-dtype")) return {search_.plan.train.compute_dtype};
    const bool has_bf16 = machine_.peak_flops.contains(at::kBFloat16);
    return {has_bf16 ? "bf16" : "fp16", "f32"};
  }

  std::vector<int64_t> gpu_counts() const {
    if (!search_.any_gpus) return {search_.plan.gpus};
    if (machine_.device == DryRunDevice::kCpu) return {1};
    std::vector<int64_t> counts;
    const int64_t batch = search_.plan.train.global_batch;
    const bool divides = is_fixed("zero-stage") && search_.plan.train.zero_stage > 0;
    for (int64_t gpus = divides ? 2 : 1; gpus <= std::min(batch, kMostGpus); gpus *= 2)
      if (batch % gpus == 0) counts.push_back(gpus);
    return counts;
  }

  std::vector<int64_t> micro_batches(int64_t rank_batch) const {
    if (is_fixed("micro-batch")) {
      const int64_t given = search_.plan.train.micro_batch;
      if (given > rank_batch) return {};
      return {given > 0 ? given : rank_batch};
    }
    std::vector<int64_t> sizes;
    for (int64_t parts = 1;; parts *= 2) {
      sizes.push_back((rank_batch + parts - 1) / parts);
      if (sizes.back() == 1) return sizes;
    }
  }

  std::vector<int64_t> stages() const {
    if (is_fixed("zero-stage")) return {search_.plan.train.zero_stage};
    return present_.gpus > 1 ? std::vector<int64_t>{0, 1, 2, 3} : std::vector<int64_t>{0};
  }

  std::vector<std::string> offloads() const {
    if (is_fixed("offload-optimizer")) return {search_.plan.train.offload_optimizer};
    return machine_.device == DryRunDevice::kCuda ? std::vector<std::string>{"none", "cpu", "nvme"}
                                                  : std::vector<std::string>{"none"};
  }

  const StepTrace& trace(const std::string& recompute) {
    auto& family = families_[{present_.compute_dtype, recompute}];
    if (!family) {
      TrainOptions options = search_.plan.train;
      options.compute_dtype = present_.compute_dtype;
      options.recompute = recompute;
      const int64_t most = search_.plan.train.global_batch / gpu_counts().front();
      family = std::make_unique<TraceFamily>(options, data_, machine_.device, micro_batches(most).front());
    }
    return family->at(present_.micro_batch, search_.plan.train.global_batch / present_.gpus);
  }

  void add_pass() {
    const auto& options = search_.plan.train;
    const bool one_set = is_fixed("recompute") || options.offload_activations != "none";
    const StepTrace& keep = trace(one_set ? options.recompute : "none");
    const StepTrace* all = one_set ? nullptr : &trace("all");
    for (int64_t stage : stages()) {
      present_.zero_stage = stage;
      present_.offload_optimizer = "none";
      const StepTrace rank_keep = of_rank(keep);
      const std::optional<StepTrace> rank_all = all ? std::optional(of_rank(*all)) : std::nullopt;
      std::optional<StepCosts> costs;
      for (const std::string& offload : offloads()) {
        present_.offload_optimizer = offload;
        beside_ = bytes_beside(rank_keep);
        add(one_set ? options.recompute : "none", rank_keep, rank_keep.memory.peak_bytes);
        if (one_set) continue;
        const bool keeps_all = has_room(configurations_.back());
        add("all", *rank_all, rank_all->memory.peak_bytes);
        if (keeps_all || !has_room(configurations_.back())) continue;
        if (!costs) costs = step_costs({&rank_keep, &*rank_all});
        add_mixtures(*costs, keep, *all);
      }
    }
  }

  Sharding sharding() const {
    Sharding sharding = sharding_of(search_.plan.train, present_.gpus, machine_);
    sharding.zero_stage = present_.zero_stage;
    sharding.offload_optimizer = present_.offload_optimizer;
    return sharding;
  }

  StepTrace of_rank(const StepTrace& trace) const {
    return is_of(trace, sharding()) ? trace : trace_of_rank(trace, sharding());
  }

  // Of the training state alone, on a rank that offloads as the present configuration does.
  int64_t persistent_bytes(const StepTrace& trace) {
    const auto [known, is_new] =
        persistent_bytes_.try_emplace({present_.compute_dtype, num_passes_ > 1, present_.gpus,
                                       present_.zero_stage, present_.offload_optimizer});
    if (is_new) {
      StepTrace state = trace;
      state.ops.clear();
      state.memory.marks.clear();
      state.memory.events.clear();
      known->second = trace_of_rank(state, sharding()).memory.persistent_bytes;
    }
    return known->second;
  }

  // What the device holds beside the live bytes of `trace`, whose rank offloads nothing: negative where less.
  int64_t bytes_beside(const StepTrace& trace) {
    return machine_.context_bytes + machine_.workspace_bytes + communication_bytes(machine_, present_.gpus) +
           autoencoder_ + persistent_bytes(trace) - trace.memory.persistent_bytes;
  }

  bool has_room(const Configuration& configuration) const {
    return configuration.least_bytes <= machine_.memory_bytes;
  }

  void add(const std::string& recompute, const StepTrace& trace, int64_t peak_bytes) {
    Configuration added = present_;
    added.recompute = recompute;
    added.least_bytes = peak_bytes + beside_;
    if (has_room(added)) added.step_s = time_step(trace, machine_, sharding()).seconds;
    configurations_.push_back(std::move(added));
  }

  void add_mixtures(const StepCosts& costs, const StepTrace& keep, const StepTrace& all) {
    std::vector<std::string> known;
    for (double share : kMixtureShares) {
      const auto budget = static_cast<int64_t>(share * static_cast<double>(machine_.memory_bytes)) - beside_;
      const std::vector<MemoryChoice> choices = fit_memory(costs, budget);
      if (choices.empty()) continue;
      TrainOptions texts;
      set_memory_choices(texts, choices, denoiser());
      if (texts.recompute == "all" || std::ranges::find(known, texts.recompute) != known.end()) continue;
      known.push_back(texts.recompute);
      add(texts.recompute, of_rank(mixed_ops(keep, all, choices)), peak_bytes(costs, choices));
    }
  }

  const Denoiser& denoiser() {
    if (!denoiser_) {
      const TrainOptions& options = search_.plan.train;
      denoiser_ = build_denoiser(
          options.model, denoiser_config_of(options, data_, *make_objective(objective_config_of(options))),
          {.device = at::kMeta});
    }
    return *denoiser_;
  }

  const SearchOptions& search_;
  const MachineProfile& machine_;
  const DataShape& data_;
  std::map<std::pair<std::string, std::string>, std::unique_ptr<TraceFamily>> families_;
  // By compute dtype, whether gradients are accumulated, GPUs, stage and offload.
  std::map<std::tuple<std::string, bool, int64_t, int64_t, std::string>, int64_t> persistent_bytes_;
  std::unique_ptr<Denoiser> denoiser_;
  Configuration present_;
  int64_t num_passes_ = 1, autoencoder_ = 0, beside_ = 0;
  std::vector<Configuration> configurations_;
};

}  // namespace

PlanOptions options_of(const SearchOptions& search, const Configuration& configuration) {
  PlanOptions options = search.plan;
  options.gpus = configuration.gpus;
  TrainOptions& train = options.train;
  const bool whole = configuration.micro_batch * configuration.gpus >= train.global_batch;
  train.micro_batch = whole ? 0 : configuration.micro_batch;
  train.compute_dtype = configuration.compute_dtype;
  train.recompute = configuration.recompute;
  train.zero_stage = configuration.zero_stage;
  train.offload_optimizer = configuration.offload_optimizer;
  if (train.offload_optimizer == "nvme" && train.nvme_path.empty()) train.nvme_path = "nvme";
  return options;
}

std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                          const DataShape& data) {
  return SpaceBuilder(search, machine, data).run();
}

}  // namespace kiln
