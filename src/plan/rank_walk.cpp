#include "plan/rank_walk.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/allocations.h"
#include "core/aten.h"
#include "ops/ops.h"
#include "plan/rank_units.h"
#include "plan/trace_parts.h"

namespace kiln {

namespace {

// In the first micro-step, and in later ones where reductions take the gradients away, gradients are written;
// else they are added to. `adding`: one of one rank's later micro-steps.
std::vector<OpRecord> written(const std::vector<OpRecord>& adding, const std::vector<OpRecord>& writing) {
  std::vector<OpRecord> ops;
  size_t i = 0;
  for (const OpRecord& write : writing) {
    const bool is_same = i < adding.size() && adding[i].name == write.name;
    ops.push_back(is_same ? adding[i] : write);
    if (is_same || write.name != "aten::zero_") ++i;  // gradients that are none are zeroed once
  }
  return ops;
}

// Walks the marks of a trace and calls ZeRO around them.
class RankComposer : public AllocationObserver {
 public:
  RankComposer(const StepTrace& source, const Sharding& sharding)
      : source_(source),
        parts_(parts_of(source)),
        dry_run_(source.device),
        log_([this] { return trace_.ops.size() + recorder_.num_recorded(); }) {
    const auto& marks = source.memory.marks;
    num_micro_steps_ = std::ranges::count_if(
        marks, [](const MemoryMark& mark) { return mark.phase == StepPhase::kForward && mark.segment == 0; });
    for (const MemoryEvent& event : source.memory.events)
      if (is_communication(event.phase)) others_.insert(event.id);
    describe_source(sharding);
  }

  StepTrace run(const Sharding& sharding) {
    const at::NoGradGuard no_grad;
    const MetaAllocationScope allocations(*this);
    const std::shared_ptr<ProcessGroup> group = dry_group(sharding.gpus, sharding.ranks_per_node);
    group->observe(&log_);
    Zero zero(group, trace_.zero);
    zero_ = &zero;
    RankUnits rank(source_, sharding, zero);
    for (FlatUnit& unit : rank.units()) units_.push_back(&unit);
    recorder_.take();  // what made them
    zero.manage(units_);
    rank.describe(trace_);
    live_ = trace_.memory.persistent_bytes;
    measure_norms();
    records_ = true;
    for (size_t i = 0; i < parts_.size(); ++i) add_mark(i);
    add_events_until(source_.memory.events.size());
    records_ = false;
    group->observe(nullptr);
    trace_.collectives = std::move(log_.events);
    find_peak(trace_.memory);
    return std::move(trace_);
  }

  void allocated(uint64_t id, size_t bytes) override { add_zero_event(id, static_cast<int64_t>(bytes)); }
  void freed(uint64_t id, size_t bytes) override { add_zero_event(id, -static_cast<int64_t>(bytes)); }

 private:
  // Phases of a step of several ranks, which gives way to that of others.
  static bool is_communication(StepPhase phase) {
    return phase == StepPhase::kCommunication || phase == StepPhase::kOffload;
  }

  void describe_source(const Sharding& sharding) {
    trace_.device = source_.device;
    trace_.segments = source_.segments;
    trace_.segment_weights = source_.segment_weights;
    trace_.num_weights = source_.num_weights;
    trace_.flops_per_image = source_.flops_per_image;
    trace_.load_peak_bytes = source_.load_peak_bytes;
    trace_.memory.persistent = source_.memory.persistent;
    trace_.zero = source_.zero;
    trace_.unit = source_.unit;
    trace_.offloaded_activation_bytes = source_.offloaded_activation_bytes;
    trace_.ops.reserve(source_.ops.size());
    trace_.memory.events.reserve(source_.memory.events.size());
    trace_.world_size = sharding.gpus;
    trace_.ranks_per_node = sharding.ranks_per_node;
    trace_.zero.stage = sharding.zero_stage;
  }

  // What the norm of each unit's gradients is made of, which this rank has a part of.
  void measure_norms() {
    recorder_.take();
    for (const FlatUnit* unit : units_)
      if (unit->layout().size > 0) ops::sum_of_squares(unit->grad_shard);
    norms_ = recorder_.take();
  }

  void begin(StepPhase phase, int64_t segment) {
    phase_ = phase;
    segment_ = static_cast<int32_t>(segment);
    recorder_.begin(phase, segment);
    phase_peak_ = live_;
    phase_begin_ = trace_.memory.events.size();
  }
  void end() {
    if (phase_ == StepPhase::kCommunication)
      for (const auto& [id, event] : zero_blocks_)
        if (event >= phase_begin_) trace_.memory.events[event].kind = MemoryKind::kGathered;
    trace_.memory.marks.push_back(
        {.phase = phase_, .segment = segment_, .live_bytes = live_, .peak_bytes = phase_peak_});
    recorder_.end(phase_, segment_);
    segment_ = -1;
  }

  void add_op(OpRecord op) { trace_.ops.push_back(std::move(op)); }
  void add_event(const MemoryEvent& event) {
    if (others_.contains(event.id)) return;
    trace_.memory.events.push_back(event);
    live_ += event.bytes;
    phase_peak_ = std::max(phase_peak_, live_);
  }
  void add_events_until(size_t end) {
    for (; next_event_ < end; ++next_event_) add_event(source_.memory.events[next_event_]);
  }
  // ZeRO's own: of what it allocates in the walk.
  void add_zero_event(uint64_t id, int64_t bytes) {
    if (!records_ || bytes == 0) return;
    MemoryEvent event{.id = id | kZeroIds,
                      .bytes = bytes,
                      .phase = phase_,
                      .segment = segment_,
                      .kind = MemoryKind::kTemporaries};
    if (bytes > 0) {
      zero_blocks_[id] = trace_.memory.events.size();
    } else {
      const auto block = zero_blocks_.find(id);
      if (block == zero_blocks_.end()) return;  // older than the walk
      event.kind = trace_.memory.events[block->second].kind;
      zero_blocks_.erase(block);
    }
    add_event(event);
  }
  template <class Call>
  void call_zero(const Call& call) {
    call();
    for (OpRecord& op : recorder_.take()) {
      op.times = times_;
      add_op(std::move(op));
    }
  }
  template <class Call>
  void communicate(int64_t segment, const Call& call) {
    if (zero_->idle()) return;
    begin(StepPhase::kCommunication, segment);
    call_zero(call);
    end();
  }

  void add_mark(size_t index) {
    const MemoryMark& mark = source_.memory.marks[index];
    if (is_communication(mark.phase)) return;
    const auto s = static_cast<size_t>(std::max(mark.segment, 0));
    if (parts_[index].ops_begin < parts_[index].ops_end) times_ = source_.ops[parts_[index].ops_begin].times;
    if (mark.phase == StepPhase::kForward) {
      if (s == 0) ++micro_step_;
      communicate(mark.segment, [&] { zero_->gather(s, 1); });
    } else if (mark.phase == StepPhase::kRecompute || (mark.phase == StepPhase::kBackward && !recomputed_)) {
      communicate(mark.segment, [&] { zero_->gather(s, -1); });
    } else if (mark.phase == StepPhase::kGradNorm) {
      times_ = 1;
      communicate(-1, [&] { zero_->finish_reductions(); });
    }
    recomputed_ = mark.phase == StepPhase::kRecompute;

    begin(mark.phase, mark.segment);
    if (mark.phase == StepPhase::kBackward) call_zero([&] { zero_->begin_gradients(s, micro_step_ == 1); });
    add_ops(index);
    add_events_until(parts_[index].events_end);
    if (mark.phase == StepPhase::kBackward) zero_->release(s);
    if (mark.phase == StepPhase::kOptimizer && units_[s]->size() > 0) call_zero([&] { zero_->publish(s); });
    end();

    if (mark.phase == StepPhase::kForward && s + 1 < units_.size()) zero_->release(s);
    if (mark.phase == StepPhase::kBackward)
      communicate(mark.segment, [&] { zero_->reduce(s, micro_step_ == 1, micro_step_ == num_micro_steps_); });
    if (index + 1 < parts_.size()) add_events_until(parts_[index + 1].events_begin);
  }

  // Elements of a unit that a rank of the source updates.
  int64_t source_elements(size_t s) const {
    const int64_t shards = source_.ranks_per_node > 0 ? source_.ranks_per_node : source_.world_size;
    return shard_elements(source_.segment_weights[s],
                          {.zero_stage = source_.zero.stage, .world_size = shards});
  }

  void add_ops(size_t index) {
    const MemoryMark& mark = source_.memory.marks[index];
    const auto s = static_cast<size_t>(std::max(mark.segment, 0));
    std::vector<OpRecord> ops(source_.ops.begin() + static_cast<int64_t>(parts_[index].ops_begin),
                              source_.ops.begin() + static_cast<int64_t>(parts_[index].ops_end));
    if (mark.phase == StepPhase::kBackward && micro_step_ == 1) first_backward_[s] = ops;
    if (mark.phase == StepPhase::kBackward && micro_step_ > 1 && units_[s]->sharding().zero_stage >= 2) {
      ops = written(ops, first_backward_[s]);
      for (OpRecord& op : ops) op.times = times_;
    }
    for (OpRecord& op : ops) {
      if (mark.phase == StepPhase::kGradNorm && next_norm_ < norms_.size() &&
          op.name == norms_[next_norm_].name)
        op.bytes = norms_[next_norm_++].bytes;
      if (mark.phase == StepPhase::kOptimizer)
        op.bytes *= static_cast<double>(units_[s]->shard_size()) / static_cast<double>(source_elements(s));
      add_op(std::move(op));
    }
  }

  static constexpr uint64_t kZeroIds = uint64_t{1} << 46;  // of a trace they count from small numbers
  const StepTrace& source_;
  const std::vector<TracePart> parts_;
  const DryRunScope dry_run_;
  OpRecorder recorder_{/*timed=*/false};
  CollectiveLog log_;
  StepTrace trace_;
  Zero* zero_ = nullptr;
  std::vector<FlatUnit*> units_;
  std::vector<OpRecord> norms_;
  std::map<size_t, std::vector<OpRecord>> first_backward_;  // by segment
  std::map<uint64_t, size_t> zero_blocks_;                  // alive -> event of the allocation
  std::set<uint64_t> others_;                               // blocks that the trace's own communication has
  bool records_ = false, recomputed_ = false;
  StepPhase phase_{};
  int32_t segment_ = -1;
  int64_t live_ = 0, phase_peak_ = 0, times_ = 1, micro_step_ = 0, num_micro_steps_ = 0;
  size_t next_event_ = 0, next_norm_ = 0, phase_begin_ = 0;
};

}  // namespace

StepTrace trace_of_rank(const StepTrace& trace, const Sharding& sharding) {
  return RankComposer(trace, sharding).run(sharding);
}

}  // namespace kiln
