#include "plan/ranks/rank_step.h"

#include <algorithm>
#include <stdexcept>
#include <unordered_set>

#include "core/allocations.h"
#include "core/aten.h"
#include "core/error.h"
#include "ops/op_recorder.h"
#include "step/span_recorder.h"

namespace kiln {

namespace {

// A model whose segments have the weights of a trace's segments and do nothing.
class OutlineModel : public Denoiser {
 public:
  explicit OutlineModel(const StepTrace& trace) {
    const auto constants = trace.memory.persistent.find(MemoryKind::kConstants);
    // The base of an adapter is held in the compute dtype and is no part of a checkpoint.
    const bool is_base = trace.options.lora.is_on();
    const auto element_bytes =
        static_cast<int64_t>(is_base ? c10::elementSize(trace.unit.compute_dtype) : sizeof(float));
    for (size_t i = 0; i < trace.segments.size(); ++i) {
      const bool has_constants = i == 0 && constants != trace.memory.persistent.end();
      segments_.push_back(std::make_unique<Outline>(trace.segments[i], trace.layouts[i],
                                                    has_constants ? constants->second / element_bytes : 0,
                                                    is_base));
    }
    if (trace.layouts.size() > trace.segments.size())
      head_ = std::make_unique<Outline>("head", trace.layouts.back(), /*num_constants=*/0, is_base);
  }

  const Segment* head() const { return head_.get(); }  // of the loss, or null

 private:
  class Outline : public Segment {
   public:
    Outline(const std::string& name, const FlatLayout& weights, int64_t num_constants, bool is_base) {
      name_ = name;
      for (const FlatSlot& slot : weights.slots) add(slot.key, slot.shape, /*trainable=*/true);
      if (num_constants == 0) return;
      add(name + ".constants", {num_constants}, /*trainable=*/false);
      parameters_.back()->frozen = is_base;
    }
    State forward(const State&, const ModelInput&) const override { return {}; }

   private:
    void add(const std::string& key, const std::vector<int64_t>& shape, bool trainable) {
      parameters_.push_back(
          std::make_shared<Parameter>(Parameter{.key = key,
                                                .value = at::empty(shape, at::TensorOptions(at::kMeta)),
                                                .init = {},
                                                .trainable = trainable}));
    }
  };

  std::unique_ptr<Outline> head_;
};

TrainOptions options_of_rank(const StepTrace& like, const Sharding& sharding) {
  TrainOptions options = like.options;
  // Every rank gets as many rows as the one of `like` with the most.
  options.global_batch = (options.global_batch + like.world_size - 1) / like.world_size * sharding.gpus;
  options.zero.stage = sharding.zero_stage;
  static_cast<StatePlacement&>(options.offload) = sharding.offload;
  return options;
}

// Copies the spans of a trace, and makes their calls again on another rank.
class Repetition {
 public:
  Repetition(RankWork& rank, SpanRecorder& recorder) : rank_(rank), recorder_(recorder) {}

  void add(const Span& span) {
    recorder_.begin_micro_step(span.micro_step);
    recorder_.stand_for(span.times);
    if (!span.by_call) begin(span);
    next_op_ = next_event_ = 0;
    for (const Span::Call& made : span.calls) {
      add_until(span, made.before_op, made.before_event);
      if (!made.inside) end(span);
      if (made.call.kind == RankCall::Kind::kFinishReductions) recorder_.end_micro_step();
      const bool adds = rank_.repeat(made.call);
      if (made.call.kind == RankCall::Kind::kBeginGradients && adds != made.call.adds)
        throw std::logic_error("a trace that adds gradients stands for one that writes them, or the reverse");
    }
    add_until(span, span.ops.size(), span.events.size());
    end(span);
  }

 private:
  void begin(const Span& span) {
    recorder_.begin(span.phase, span.segment);
    in_phase_ = true;
  }
  void end(const Span& span) {
    if (std::exchange(in_phase_, false)) recorder_.end(span.phase, span.segment);
  }

  // Copies what is before `op` and `event`, without what the calls of the trace did themselves.
  void add_until(const Span& span, size_t op, size_t event) {
    if (next_op_ == 0 && op > 0) recorder_.span().ops.reserve(recorder_.span().ops.size() + span.ops.size());
    if (next_event_ == 0 && event > 0)
      recorder_.span().events.reserve(recorder_.span().events.size() + span.events.size());
    for (; next_op_ < op; ++next_op_)
      if (!span.ops[next_op_].by_call) recorder_.span().ops.push_back(span.ops[next_op_]);
    for (; next_event_ < event; ++next_event_) {
      const MemoryEvent& made = span.events[next_event_];
      if (made.by_call && made.bytes > 0) of_calls_.insert(made.id);
      if (!made.by_call && !of_calls_.contains(made.id)) recorder_.span().events.push_back(made);
    }
  }

  RankWork& rank_;
  SpanRecorder& recorder_;
  bool in_phase_ = false;
  size_t next_op_ = 0, next_event_ = 0;
  std::unordered_set<uint64_t> of_calls_;  // blocks that the trace's own calls allocated
};

}  // namespace

Sharding sharding_of(const TrainOptions& options, int64_t gpus, const MachineProfile& machine) {
  const int64_t per_node = ranks_on_node(machine, gpus);
  return {.gpus = gpus,
          .zero_stage = options.zero.stage,
          .offload = options.offload,
          .ranks_per_node = options.zero.shard_within_node && per_node < gpus ? per_node : 0};
}

void validate(const Sharding& sharding) {
  if (sharding.gpus < 1) fail("plan", "--gpus expects a positive number, got {}", sharding.gpus);
  if (sharding.zero_stage < 0 || sharding.zero_stage > 3)
    fail("plan", "--zero-stage expects 0, 1, 2 or 3, got {}", sharding.zero_stage);
}

bool is_of(const StepTrace& trace, const Sharding& sharding) {
  return trace.world_size == sharding.gpus && trace.zero.stage == sharding.zero_stage &&
         trace.ranks_per_node == sharding.ranks_per_node &&
         trace.unit.placement == sharding.offload.on(trace.device == DryRunDevice::kCuda);
}

RankStep::RankStep(const StepTrace& like, const Sharding& sharding)
    : device_(like.device),
      options_(options_of_rank(like, sharding)),
      ranks_per_node_(sharding.ranks_per_node),
      group_(dry_group(sharding.gpus, sharding.ranks_per_node)),
      optimizer_(make_optimizer(optimizer_config_of(options_.optimizer))) {
  const DryRunScope dry_run(device_);
  SpanRecorder making;
  const MetaAllocationScope scope(making);
  auto outline = std::make_unique<OutlineModel>(like);
  TrainingStateOptions state_options = state_options_of(options_, at::kMeta, group_);
  state_options.head = outline->head();
  outline_ = std::move(outline);
  group_->observe(&making);
  state_ = std::make_unique<TrainingState>(*outline_, *optimizer_, state_options);
  work_ = std::make_unique<RankWork>(*optimizer_, *state_, at::kMeta, options_.ema.schedule);
  group_->observe(nullptr);
  under_way_ = making.finish().under_way;
  describe_state(*state_, described_);
}

StepTrace RankStep::trace(const StepTrace& source) {
  const DryRunScope dry_run(device_);
  const at::NoGradGuard no_grad;
  StepTrace trace = described_;
  {
    OpRecorder ops(/*timed=*/false);
    SpanRecorder recorder(&ops);
    recorder.register_state(*state_);
    const MetaAllocationScope scope(recorder);
    group_->observe(&recorder);
    work_->observe(&recorder);
    Repetition repetition(*work_, recorder);
    for (const Span& span : source.spans) repetition.add(span);
    work_->observe(nullptr);
    group_->observe(nullptr);
    static_cast<RecordedStep&>(trace) = recorder.finish();
  }
  trace.under_way = under_way_;
  // What this step has begun last is under way when the next one begins.
  std::vector<CollectiveEvent> begun;
  for (const Span& span : trace.spans)
    std::ranges::copy_if(span.collectives, std::back_inserter(begun), &CollectiveEvent::begins);
  std::copy(begun.end() - static_cast<int64_t>(std::min(begun.size(), under_way_.size())), begun.end(),
            under_way_.begin());
  trace.device = device_;
  trace.options = options_;
  trace.data = source.data;
  trace.world_size = group_->world_size();
  trace.ranks_per_node = ranks_per_node_;
  trace.segments = source.segments;
  trace.layouts = source.layouts;
  trace.segment_weights = source.segment_weights;
  trace.num_weights = source.num_weights;
  trace.num_base_weights = source.num_base_weights;
  trace.flops_per_image = source.flops_per_image;
  trace.checkpoint_bytes = source.checkpoint_bytes;
  trace.offloaded_activation_bytes = source.offloaded_activation_bytes;
  return trace;
}

void RankStep::add_checkpoint_part(StepTrace& trace) const {
  const DryRunScope dry_run(device_);
  const at::NoGradGuard no_grad;
  StepTrace described;
  describe_checkpoint(*state_, described);
  trace.checkpoint_part_bytes = described.checkpoint_part_bytes;
}

int64_t RankStep::persistent_bytes() const {
  SpanRecorder recorder;
  recorder.register_state(*state_);
  return recorder.finish().memory.persistent_bytes;
}

StepTrace trace_of_rank(const StepTrace& trace, const Sharding& sharding, bool has_checkpoint_part) {
  if (num_micro_steps(trace) > 1 && (trace.zero.stage >= 2) != (sharding.zero_stage >= 2))
    return trace_step(options_of_rank(trace, sharding), trace.data, trace.device, sharding.gpus,
                      sharding.ranks_per_node);
  RankStep rank(trace, sharding);
  StepTrace composed = rank.trace(trace);
  if (has_checkpoint_part) rank.add_checkpoint_part(composed);
  return composed;
}

bool change_num_ranks(StepTrace& trace, const Sharding& sharding) {
  const Sharding same{.gpus = trace.world_size,
                      .zero_stage = 0,
                      .offload = sharding.offload,
                      .ranks_per_node = trace.ranks_per_node};
  if (trace.world_size == 1 || sharding.gpus == 1 || sharding.zero_stage > 0 || !is_of(trace, same))
    return false;
  trace.options = options_of_rank(trace, sharding);
  trace.world_size = sharding.gpus;
  trace.ranks_per_node = sharding.ranks_per_node;
  const Ranks ranks = dry_group(sharding.gpus, sharding.ranks_per_node)->ranks();
  for (Span& span : trace.spans)
    for (CollectiveEvent& event : span.collectives) {
      if (!event.begins) continue;
      event.start.num_ranks = ranks.world_size;
      event.start.on_one_machine = ranks.local_world_size == ranks.world_size;
    }
  return true;
}

}  // namespace kiln
