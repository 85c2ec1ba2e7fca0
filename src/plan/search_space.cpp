#include "plan/search_space.h"

#include <algorithm>
#include <memory>
#include <tuple>

#include "models/registry.h"
#include "plan/segment_costs.h"
#include "plan/trace_family.h"

namespace kiln {

namespace {

constexpr int64_t kMostGpus = 1024;
// A configuration that would leave less than this for the allocator's fragmentation cannot be chosen.
constexpr double kMostShare = 0.97;
// Shares of the memory that mixtures of keeping and recomputing aim at: what fragmentation leaves, and what
// the advice calls comfortable.
constexpr double kMixtureShares[] = {0.95, 0.85};

class SpaceBuilder {
 public:
  SpaceBuilder(const SearchOptions& search, const MachineProfile& machine, const DataShape& data)
      : search_(search), machine_(machine), data_(data) {}

  std::vector<Configuration> run() {
    for (const std::string& dtype : dtypes())
      for (int64_t gpus : gpu_counts()) {
        const int64_t rank_batch = search_.plan.train.global_batch / gpus;
        for (int64_t micro_batch : micro_batches(rank_batch)) {
          present_ = {.gpus = gpus, .micro_batch = micro_batch, .compute_dtype = dtype};
          num_passes_ = (rank_batch + micro_batch - 1) / micro_batch;
          add_pass();
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
    return family->at(present_.micro_batch, num_passes_);
  }

  void add_pass() {
    const auto& options = search_.plan.train;
    const bool one_set = is_fixed("recompute") || options.offload_activations != "none";
    const StepTrace& keep = trace(one_set ? options.recompute : "none");
    const StepTrace* all = one_set ? nullptr : &trace("all");
    std::optional<StepCosts> costs;
    for (int64_t stage : stages())
      for (const std::string& offload : offloads()) {
        present_.zero_stage = stage;
        present_.offload_optimizer = offload;
        add(one_set ? options.recompute : "none", keep, keep.memory.peak_bytes);
        if (one_set) continue;
        const bool keeps_all = has_room(configurations_.back());
        add("all", *all, all->memory.peak_bytes);
        if (keeps_all || is_dominated() || !has_room(configurations_.back())) continue;
        if (!costs) costs = step_costs({&keep, all});
        add_mixtures(*costs, *all);
      }
  }

  Sharding sharding() const {
    return {.gpus = present_.gpus,
            .zero_stage = present_.zero_stage,
            .offload_optimizer = present_.offload_optimizer};
  }

  const RankState& state(const StepTrace& trace) {
    const bool accumulates = num_passes_ > 1;
    const auto [known, is_new] = states_.try_emplace({present_.compute_dtype, accumulates, present_.gpus,
                                                      present_.zero_stage, present_.offload_optimizer});
    if (is_new) known->second = shard_state(trace, sharding());
    return known->second;
  }

  // What the device holds beside the live bytes of a rank that keeps everything: negative where it keeps
  // less.
  int64_t bytes_beside(const StepTrace& trace) {
    return machine_.context_bytes + machine_.workspace_bytes + communication_bytes(machine_, present_.gpus) +
           state(trace).device_bytes() - trace.memory.persistent_bytes;
  }

  bool has_room(const Configuration& configuration) const {
    return static_cast<double>(configuration.least_bytes) <=
           kMostShare * static_cast<double>(machine_.memory_bytes);
  }

  // A GPU takes longer in f32, and needs more: the same configuration in half precision is in the space.
  bool is_dominated() const {
    return machine_.device == DryRunDevice::kCuda && present_.compute_dtype != dtypes().front();
  }

  void add(const std::string& recompute, const StepTrace& trace, int64_t peak_bytes) {
    Configuration added = present_;
    added.recompute = recompute;
    added.least_bytes = peak_bytes + bytes_beside(trace);
    if (has_room(added) && !is_dominated()) added.step_s = time_step(trace, machine_, sharding()).seconds;
    configurations_.push_back(std::move(added));
  }

  void add_mixtures(const StepCosts& costs, const StepTrace& all) {
    std::vector<std::string> known;
    for (double share : kMixtureShares) {
      const auto budget = static_cast<int64_t>(share * static_cast<double>(machine_.memory_bytes)) -
                          bytes_beside(all) - state(all).transient_bytes;
      const std::vector<MemoryChoice> choices = fit_memory(costs, budget);
      if (choices.empty()) continue;
      TrainOptions texts;
      set_memory_choices(texts, choices, denoiser());
      if (texts.recompute == "all" || std::ranges::find(known, texts.recompute) != known.end()) continue;
      known.push_back(texts.recompute);
      StepTrace mixture = all;
      std::erase_if(mixture.ops, [&](const OpRecord& op) {
        return op.phase == StepPhase::kRecompute && op.segment >= 0 &&
               choices[static_cast<size_t>(op.segment)].activations == Activations::kKeep;
      });
      add(texts.recompute, mixture, peak_bytes(costs, choices));
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
  std::map<std::tuple<std::string, bool, int64_t, int64_t, std::string>, RankState> states_;
  std::unique_ptr<Denoiser> denoiser_;
  Configuration present_;
  int64_t num_passes_ = 1;
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
