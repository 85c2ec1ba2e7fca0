#include "plan/search/search_space.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "models/registry.h"
#include "plan/memory/plan_memory.h"
#include "plan/memory/segment_costs.h"
#include "plan/price/attention_engine.h"
#include "plan/ranks/rank_step.h"
#include "plan/ranks/step_time.h"
#include "plan/trace/phases.h"
#include "plan/trace/trace_family.h"
#include "train/memory_choices.h"

namespace kiln {

namespace {

constexpr int64_t kMostTriedGpus = 1024;

// Shares of the usable memory that mixtures of keeping and recomputing aim at. Fragmentation takes the rest.
constexpr double kMixtureShares[] = {0.98, 0.9};

class SpaceBuilder {
 public:
  SpaceBuilder(const SearchOptions& search, const MachineProfile& machine, const DataDescription& data,
               SearchTraces& traces)
      : search_(search), machine_(machine), data_(data), traces_(traces), axes_(search, machine) {}

  std::vector<Configuration> run() {
    for (const at::ScalarType dtype : axes_.dtypes()) {
      TrainOptions options = search_.plan.train;
      options.compute.dtype = dtype;
      frozen_ = autoencoder_bytes(options, data_, machine_.device) + feature_net_bytes(options) +
                text_encoder_bytes(options, data_, machine_.device);
      for (int64_t gpus : axes_.gpu_counts()) {
        for (int64_t micro_batch : axes_.micro_batches(gpus)) {
          for (const bool leaves_gelu : axes_.gelu_choices()) {
            present_ = {
                .gpus = gpus, .micro_batch = micro_batch, .compute_dtype = dtype, .leaves_gelu = leaves_gelu};
            add_pass();
          }
        }
      }
    }
    return std::move(configurations_);
  }

 private:
  const StepTrace& trace(const SegmentSet& recompute, const SegmentSet& offload_activations) {
    auto& family = families_[{present_.compute_dtype, present_.leaves_gelu, recompute, offload_activations}];
    if (!family) {
      TrainOptions options = search_.plan.train;
      options.compute.dtype = present_.compute_dtype;
      if (present_.leaves_gelu) options.compute.untried_gpu.leave_out(Untried::kKeepGelu);
      options.memory.recompute = recompute;
      options.memory.offload_activations = offload_activations;
      const int64_t largest = axes_.micro_batches(axes_.gpu_counts().front()).front();
      family = &traces_.family(traced_options(options, machine_), data_.shape, machine_.device, largest);
    }
    return family->at(present_.micro_batch, search_.plan.train.global_batch / present_.gpus,
                      present_.zero_stage);
  }

  void add_pass() {
    roomy_.clear();
    for (int64_t stage : axes_.stages(present_.gpus)) {
      present_.zero_stage = stage;
      if (present_.gpus > 1) roomy_.clear();
      for (const Placement offload : axes_.weight_places(present_.gpus, stage)) {
        present_.offload.params = offload;
        add_stage();
      }
    }
  }

  // Adds the pass at one stage, with the weights where they are, for all places of the optimizer and all sets
  // of activations.
  void add_stage() {
    const auto& options = search_.plan.train;
    present_.offload.optimizer = Placement::kDevice;
    std::optional<RankTraces> of_stage;
    std::optional<StepCosts> costs;
    for (const Placement offload : axes_.optimizer_places()) {
      if (present_.offload.params != Placement::kDevice && !axes_.is_fixed("offload-params") &&
          roomy_.contains(offload))
        continue;  // it fits with the weights on the device
      if (!of_stage) of_stage = rank_traces();
      present_.offload.optimizer = offload;
      beside_ = bytes_beside(*of_stage->keep);
      add(axes_.is_one_set() ? options.memory.recompute : SegmentSet(), *of_stage->keep,
          of_stage->keep->memory.peak_bytes);
      const bool keeps_all = has_room(configurations_.back());
      note_room(offload);
      if (axes_.is_one_set()) continue;
      add(SegmentSet::all(), *of_stage->all, of_stage->all->memory.peak_bytes);
      const bool recomputes_all = has_room(configurations_.back());
      note_room(offload);
      if (!keeps_all && recomputes_all) {
        if (!costs) costs = step_costs({of_stage->keep.get(), of_stage->all.get()});
        add_mixtures(*costs, trace({}, {}), trace(SegmentSet::all(), {}));
      } else if (!recomputes_all && axes_.may_offload_activations()) {
        add_offloaded(*of_stage);
      }
    }
  }

  // Traces of a rank that offloads no optimizer.
  struct RankTraces {
    std::shared_ptr<const StepTrace> keep, all{}, offloaded{};
  };
  RankTraces rank_traces() {
    const auto& options = search_.plan.train;
    if (axes_.is_one_set())
      return {.keep = traces_.of_rank(trace(options.memory.recompute, options.memory.offload_activations),
                                      sharding())};
    return {.keep = traces_.of_rank(trace({}, {}), sharding()),
            .all = traces_.of_rank(trace(SegmentSet::all(), {}), sharding())};
  }

  void add_offloaded(RankTraces& of_stage) {
    const Placement optimizer = std::exchange(present_.offload.optimizer, Placement::kDevice);
    if (!of_stage.offloaded) of_stage.offloaded = traces_.of_rank(trace({}, SegmentSet::all()), sharding());
    present_.offload.optimizer = optimizer;
    present_.offload_activations = SegmentSet::all();
    add({}, *of_stage.offloaded, of_stage.offloaded->memory.peak_bytes);
    present_.offload_activations = {};
    note_room(optimizer);
  }

  Sharding sharding() const {
    Sharding sharding = sharding_of(search_.plan.train, present_.gpus, machine_);
    sharding.zero_stage = present_.zero_stage;
    sharding.offload = present_.offload;
    return sharding;
  }

  // Returns what the device holds beside the live bytes of `trace`, whose rank offloads no optimizer.
  // Negative if it holds less than these.
  int64_t bytes_beside(const StepTrace& trace) {
    return machine_.context_bytes + workspaces_bytes(machine_, trace.options.compute.cuda_graph) +
           communication_bytes(machine_, present_.gpus) + frozen_ +
           traces_.rank(trace, sharding()).persistent_bytes() - trace.memory.persistent_bytes;
  }

  // Notes a place of the optimizer that leaves room, with some to spare for what the allocator loses to
  // fragments. Nothing more has to be offloaded then.
  void note_room(Placement optimizer) {
    const double share = *std::ranges::min_element(kMixtureShares);
    if (static_cast<double>(configurations_.back().least_bytes) <= share * usable_bytes())
      roomy_.insert(optimizer);
  }

  double usable_bytes() const { return search_.memory_share * static_cast<double>(machine_.memory_bytes); }

  bool has_room(const Configuration& configuration) const {
    return static_cast<double>(configuration.least_bytes) <= usable_bytes();
  }

  void add(const SegmentSet& recompute, const StepTrace& trace, int64_t peak_bytes) {
    Configuration added = present_;
    added.recompute = recompute;
    added.least_bytes = peak_bytes + beside_;
    if (added.least_bytes <= machine_.memory_bytes)
      added.step_s = time_step(trace, machine_, sharding()).seconds;
    configurations_.push_back(std::move(added));
  }

  void add_mixtures(const StepCosts& costs, const StepTrace& keep, const StepTrace& all) {
    std::vector<SegmentSet> known;
    for (double share : kMixtureShares) {
      const auto budget = static_cast<int64_t>(share * usable_bytes()) - beside_;
      const std::vector<MemoryChoice> choices = fit_memory(costs, budget);
      if (choices.empty()) continue;
      MemoryOptions sets;
      set_memory_choices(sets, choices, denoiser());
      if (sets.recompute.is_all() || std::ranges::find(known, sets.recompute) != known.end()) continue;
      known.push_back(sets.recompute);
      const StepTrace mixed = mixed_ops(keep, all, choices);
      if (is_of(mixed, sharding()))
        add(sets.recompute, mixed, peak_bytes(costs, choices));
      else
        add(sets.recompute, traces_.rank(mixed, sharding()).trace(mixed), peak_bytes(costs, choices));
    }
  }

  const Denoiser& denoiser() {
    if (!denoiser_) {
      const TrainOptions& options = search_.plan.train;
      denoiser_ = build_denoiser(
          options.model.name,
          denoiser_config_of(options, data_.shape, *make_objective(objective_config_of(options.objective))),
          {.device = at::kMeta});
    }
    return *denoiser_;
  }

  const SearchOptions& search_;
  const MachineProfile& machine_;
  const DataDescription& data_;
  SearchTraces& traces_;
  const SearchAxes axes_;
  // By compute dtype, whether GELU is left out, --recompute and --offload-activations.
  std::map<std::tuple<at::ScalarType, bool, SegmentSet, SegmentSet>, TraceFamily*> families_;
  // Places of the optimizer with which some set of activations of this pass has room, weights on the device.
  std::set<Placement> roomy_;
  std::unique_ptr<Denoiser> denoiser_;
  Configuration present_;
  int64_t frozen_ = 0;  // bytes of nets that are not trained
  int64_t beside_ = 0;  // bytes_beside() at present
  std::vector<Configuration> configurations_;
};

}  // namespace

std::vector<at::ScalarType> SearchAxes::dtypes() const {
  if (is_fixed("compute-dtype")) return {search_.plan.train.compute.dtype};
  const bool has_bf16 = machine_.peak_flops.contains(at::kBFloat16);
  return {has_bf16 ? at::kBFloat16 : at::kHalf, at::kFloat};
}

std::vector<int64_t> SearchAxes::gpu_counts() const {
  if (!search_.any_gpus) return {search_.plan.gpus};
  if (!on_cuda()) return {1};
  std::vector<int64_t> counts;
  const int64_t batch = search_.plan.train.global_batch;
  const bool divides = is_fixed("zero-stage") && search_.plan.train.zero.stage > 0;
  for (int64_t gpus = divides ? 2 : 1; gpus <= std::min(batch, kMostTriedGpus); gpus *= 2)
    if (batch % gpus == 0) counts.push_back(gpus);
  return counts;
}

std::vector<int64_t> SearchAxes::micro_batches(int64_t gpus) const {
  const TrainOptions& train = search_.plan.train;
  if (is_fixed("micro-batch")) return {rows_of_walk(train, gpus)};
  const int64_t rank_batch = train.global_batch / gpus;
  std::vector<int64_t> sizes;
  for (int64_t parts = 1;; parts *= 2) {
    sizes.push_back((rank_batch + parts - 1) / parts);
    if (sizes.back() == 1) return sizes;
  }
}

std::vector<int64_t> SearchAxes::stages(int64_t gpus) const {
  if (is_fixed("zero-stage")) return {search_.plan.train.zero.stage};
  if (is_fixed("offload-params") && search_.plan.train.offload.params != Placement::kDevice) return {3};
  if (gpus > 1) return {0, 1, 2, 3};
  const bool can_offload = on_cuda() && !is_fixed("offload-params");
  return can_offload ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{0};
}

std::vector<Placement> SearchAxes::optimizer_places() const {
  if (is_fixed("offload-optimizer")) return {search_.plan.train.offload.optimizer};
  if (!on_cuda()) return {Placement::kDevice};
  return {Placement::kDevice, Placement::kHost, Placement::kNvme};
}

std::vector<Placement> SearchAxes::weight_places(int64_t gpus, int64_t zero_stage) const {
  if (is_fixed("offload-params")) return {search_.plan.train.offload.params};
  if (!on_cuda() || zero_stage < 3) return {Placement::kDevice};
  if (gpus == 1 && !is_fixed("zero-stage"))
    return {Placement::kHost, Placement::kNvme};  // weights on the device are stage 0
  return {Placement::kDevice, Placement::kHost, Placement::kNvme};
}

bool SearchAxes::is_one_set() const {
  return is_fixed("recompute") || !search_.plan.train.memory.offload_activations.is_none();
}

bool SearchAxes::may_offload_activations() const {
  return on_cuda() && !is_fixed("offload-activations") && !is_one_set();
}

std::vector<bool> SearchAxes::gelu_choices() const {
  if (search_.plan.train.compute.untried_gpu.has(Untried::kKeepGelu)) return {false, true};
  return {false};
}

PlanOptions options_of(const SearchOptions& search, const Configuration& configuration) {
  PlanOptions options = search.plan;
  options.gpus = configuration.gpus;
  TrainOptions& train = options.train;
  const bool whole = configuration.micro_batch * configuration.gpus >= train.global_batch;
  train.memory.budget = {};  // the machine's memory has it already, and the search chooses what keeps to it
  train.micro_batch = whole ? 0 : configuration.micro_batch;
  train.compute.dtype = configuration.compute_dtype;
  if (configuration.leaves_gelu) train.compute.untried_gpu.leave_out(Untried::kKeepGelu);
  train.memory.recompute = configuration.recompute;
  train.zero.stage = configuration.zero_stage;
  static_cast<StatePlacement&>(train.offload) = configuration.offload;
  if (search.plan.train.memory.offload_activations.is_none())
    train.memory.offload_activations = configuration.offload_activations;
  if (train.offload.uses_disk() && train.offload.nvme.folder.empty()) train.offload.nvme.folder = "nvme";
  return options;
}

std::vector<Configuration> configurations(const SearchOptions& search, const MachineProfile& machine,
                                          const DataDescription& data, SearchTraces& traces) {
  return SpaceBuilder(search, machine, data, traces).run();
}

}  // namespace kiln
