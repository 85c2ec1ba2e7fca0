#include "plan/rank_walk.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "core/allocations.h"
#include "parallel/host_exchange.h"
#include "parallel/nvme_state.h"

namespace kiln {

namespace {

class PeakSince : public AllocationObserver {
 public:
  void allocated(uint64_t, size_t bytes) override {
    live_ += static_cast<int64_t>(bytes);
    peak_ = std::max(peak_, live_);
  }
  void freed(uint64_t, size_t bytes) override { live_ -= static_cast<int64_t>(bytes); }
  void begin() { begin_ = peak_ = live_; }
  int64_t rise() const { return peak_ - begin_; }

 private:
  int64_t live_ = 0, peak_ = 0, begin_ = 0;
};

// Where the operations of a trace's segments begin and end.
class OpPositions {
 public:
  enum Part { kForward, kBackward, kUpdate };  // backward: recomputation included
  explicit OpPositions(const std::vector<OpRecord>& ops) {
    bool in_backward = false;
    for (size_t i = 0; i < ops.size(); ++i) {
      const StepPhase phase = ops[i].phase;
      if (phase == StepPhase::kForward && in_backward) ++num_micro_steps_;
      if (phase == StepPhase::kForward) in_backward = false;
      if (phase == StepPhase::kBackward) in_backward = true;
      if (ops[i].segment < 0) continue;
      const std::optional<Part> part = part_of(phase);
      if (!part) continue;
      const size_t micro_step = *part == kUpdate ? 0 : num_micro_steps_ - 1;
      const auto [range, is_new] =
          ranges_.try_emplace({micro_step, *part, static_cast<size_t>(ops[i].segment)}, i, i + 1);
      range->second.second = i + 1;
    }
  }
  size_t num_micro_steps() const { return num_micro_steps_; }
  // Of the segment's operations; `otherwise` where it has none.
  size_t begin(size_t micro_step, Part part, size_t segment, size_t otherwise) const {
    const auto found = ranges_.find({micro_step, part, segment});
    return found == ranges_.end() ? otherwise : found->second.first;
  }
  size_t end(size_t micro_step, Part part, size_t segment, size_t otherwise) const {
    const auto found = ranges_.find({micro_step, part, segment});
    return found == ranges_.end() ? otherwise : found->second.second;
  }

 private:
  static std::optional<Part> part_of(StepPhase phase) {
    if (phase == StepPhase::kForward) return kForward;
    if (phase == StepPhase::kRecompute || phase == StepPhase::kBackward) return kBackward;
    if (phase == StepPhase::kOptimizer) return kUpdate;
    return std::nullopt;
  }

  size_t num_micro_steps_ = 1;
  std::map<std::tuple<size_t, Part, size_t>, std::pair<size_t, size_t>> ranges_;
};

// The flat units of a rank, as TrainingState makes them.
class RankUnits {
 public:
  RankUnits(const StepTrace& trace, const Sharding& sharding, const Zero& zero) : options_(trace.unit) {
    options_.placement = placement_of(sharding, trace.device);
    std::vector<int64_t> elements;
    for (const int64_t weights : trace.segment_weights)
      elements.push_back(state_elements(shard_elements(weights, zero.sharding_of(weights)), options_));
    if (options_.placement == Placement::kNvme)
      options_.nvme = std::make_shared<NvmeState>(elements, BlockStoreOptions{}, at::kMeta);
    else if (options_.placement == Placement::kHost)
      for (const int64_t count : elements) host_bytes_ += 4 * count;
    units_.reserve(trace.segment_weights.size());
    for (const int64_t weights : trace.segment_weights) {
      FlatLayout layout;
      if (weights > 0) layout.add("weights", {weights});
      options_.sharding = zero.sharding_of(weights);
      options_.nvme_unit = units_.size();
      units_.emplace_back("unit", std::move(layout), options_);
    }
  }
  std::vector<FlatUnit>& units() { return units_; }

  // `trace`: whose bytes beside the units are those of this rank, too.
  RankState state(const StepTrace& trace) const {
    MemoryRecorder memory;
    for (const FlatUnit& unit : units_) memory.register_unit(unit);
    const bool has_host = trace.device == DryRunDevice::kCuda;
    RankState state;
    state.pinned_bytes = host_bytes_;
    if (options_.nvme) {
      state.nvme_bytes = options_.nvme->disk_bytes();
      for (const at::Tensor& buffer : options_.nvme->buffers()) {
        if (has_host) state.pinned_bytes += static_cast<int64_t>(buffer.nbytes());
        memory.register_tensor(buffer, MemoryKind::kStaging);
      }
    }
    if (options_.placement != Placement::kDevice && has_host) state.pinned_bytes += exchange_bytes();
    state.device = memory.finish().persistent;
    if (const auto constants = trace.memory.persistent.find(MemoryKind::kConstants);
        constants != trace.memory.persistent.end())
      state.device.insert(*constants);
    return state;
  }

 private:
  int64_t exchange_bytes() const {
    int64_t largest = 0;
    for (const FlatUnit& unit : units_) largest = std::max(largest, unit.shard_size());
    return HostExchange(at::kMeta, largest, options_.grad_dtype, options_.compute_dtype).host_bytes();
  }

  FlatUnitOptions options_;
  std::vector<FlatUnit> units_;
  int64_t host_bytes_ = 0;
};

}  // namespace

Placement placement_of(const Sharding& sharding, DryRunDevice device) {
  if (sharding.offload_optimizer == "nvme") return Placement::kNvme;
  return sharding.offload_optimizer == "cpu" && device == DryRunDevice::kCuda ? Placement::kHost
                                                                              : Placement::kDevice;
}

RankWalk walk_rank(const StepTrace& trace, const Sharding& sharding) {
  const DryRunScope dry_run(trace.device);
  const at::NoGradGuard no_grad;
  PeakSince memory;
  const MetaAllocationScope allocations(memory);
  size_t position = 0;
  CollectiveLog log([&] { return position; });
  const std::shared_ptr<ProcessGroup> group = dry_group(sharding.gpus);
  group->observe(&log);
  ZeroOptions options = trace.zero;
  options.stage = sharding.zero_stage;
  Zero zero(group, options);
  RankUnits rank(trace, sharding, zero);
  std::vector<FlatUnit*> units;
  for (FlatUnit& unit : rank.units()) units.push_back(&unit);
  zero.manage(units);
  RankWalk walk{.state = rank.state(trace), .collectives = {}};

  memory.begin();
  const OpPositions ops(trace.ops);
  const size_t num_units = units.size(), micro_steps = ops.num_micro_steps();
  for (size_t micro = 0; micro < micro_steps; ++micro) {
    for (size_t i = 0; i < num_units; ++i) {
      position = ops.begin(micro, OpPositions::kForward, i, position);
      zero.gather(i, 1);
      if (i + 1 < num_units) zero.release(i);
    }
    for (size_t i = num_units; i-- > 0;) {
      position = ops.begin(micro, OpPositions::kBackward, i, position);
      zero.gather(i, -1);
      zero.begin_gradients(i, micro == 0);
      zero.release(i);
      position = ops.end(micro, OpPositions::kBackward, i, position);
      zero.reduce(i, micro == 0, micro + 1 == micro_steps);
    }
  }
  zero.finish_reductions();
  for (size_t i = 0; i < num_units; ++i) {
    position = ops.end(0, OpPositions::kUpdate, i, position);
    if (units[i]->size() > 0) zero.publish(i);
  }
  walk.state.transient_bytes = memory.rise();
  group->observe(nullptr);
  walk.collectives = std::move(log.events);
  return walk;
}

}  // namespace kiln
