#include "step/span_recorder.h"

#include <ATen/core/Tensor.h>

#include <utility>

#include "core/scratch.h"
#include "models/model.h"
#include "step/training_state.h"

namespace kiln {

void visit_state(const TrainingState& state, const StateVisitor& visitor) {
  const auto visit = [&](const at::Tensor& tensor, MemoryKind kind) {
    if (tensor.defined()) visitor(tensor, kind);
  };
  for (const auto& segment : state.segments) {
    const FlatUnit& unit = segment.unit;
    visit(unit.master, MemoryKind::kMaster);
    for (const at::Tensor& weights : {unit.compute_weights, unit.weight_shard})
      visit(weights, MemoryKind::kWeights);
    for (const at::Tensor& grads : {unit.grads, unit.grad_shard}) visit(grads, MemoryKind::kGradients);
    for (const at::Tensor& moment : unit.moments) visit(moment, MemoryKind::kMoments);
    for (const at::Tensor& ema : unit.emas) visit(ema, MemoryKind::kEma);
  }
  for (const auto* untrained : {&state.constants, &state.frozen})
    for (const auto& parameter : *untrained) visit(parameter->value, MemoryKind::kConstants);
  if (state.nvme)
    for (const at::Tensor& buffer : state.nvme->buffers()) visit(buffer, MemoryKind::kStaging);
}

void SpanRecorder::register_tensor(const at::Tensor& tensor, MemoryKind kind) {
  const uint64_t id = block_id(tensor);
  const auto bytes = static_cast<int64_t>(id ? tensor.storage().nbytes() : 0);
  if (bytes == 0 || !registered_.emplace(id, bytes).second) return;
  add_persistent(bytes, kind);
}

void SpanRecorder::register_mapped(const at::Tensor& tensor, MemoryKind kind) {
  if (block_id(tensor) == 0) add_persistent(static_cast<int64_t>(tensor.nbytes()), kind);
}

void SpanRecorder::add_persistent(int64_t bytes, MemoryKind kind) {
  step_.memory.persistent[kind] += bytes;
  step_.memory.persistent_bytes += bytes;
}

void SpanRecorder::register_state(const TrainingState& state) {
  visit_state(state, [this](const at::Tensor& tensor, MemoryKind kind) { register_tensor(tensor, kind); });
}

void SpanRecorder::allocated(uint64_t id, size_t bytes) {
  if (bytes == 0 || std::this_thread::get_id() != thread_) return;
  MemoryEvents& events = receiver().events;
  blocks_[id] = {.span = step_.spans.empty() ? 0 : step_.spans.size() - 1,
                 .event = events.size(),
                 .scratch_scope = current_scratch().scope};
  events.push_back({.id = id, .bytes = static_cast<int64_t>(bytes), .by_call = in_call_});
}

void SpanRecorder::freed(uint64_t id, size_t bytes) {
  if (bytes == 0 || std::this_thread::get_id() != thread_) return;
  const auto block = blocks_.find(id);
  if (block == blocks_.end()) return;  // it is older than the recording
  Span& span = step_.spans.empty() ? before_ : step_.spans[block->second.span];
  MemoryEvent& made = span.events[block->second.event];
  const ScratchUse scratch = current_scratch();
  if (scratch.scratch != Scratch::kNone && scratch.scope == block->second.scratch_scope)
    made.kind = scratch.scratch == Scratch::kAttention ? MemoryKind::kAttention : MemoryKind::kMatmul;
  const MemoryKind kind = made.kind;
  blocks_.erase(block);
  receiver().events.push_back(
      {.id = id, .bytes = -static_cast<int64_t>(bytes), .kind = kind, .by_call = in_call_});
}

// Gives the operations since the last call to the current span.
void SpanRecorder::take_ops() {
  if (!ops_) return;
  for (OpRecord& op : ops_->take()) {
    op.by_call = in_call_;
    receiver().ops.push_back(std::move(op));
  }
}

void SpanRecorder::add(CollectiveEvent event) {
  if (step_.spans.empty()) {
    step_.under_way.push_back(std::move(event));
    return;
  }
  event.before_op = span().ops.size() + (ops_ ? ops_->num_recorded() : 0);
  span().collectives.push_back(std::move(event));
}

void SpanRecorder::begin_call(const RankCall& call) {
  take_ops();
  in_call_ = true;
  Span& span = receiver();
  span.calls.push_back(
      {.call = call, .inside = in_phase_, .before_op = span.ops.size(), .before_event = span.events.size()});
}

void SpanRecorder::end_call(const RankCall& call) {
  take_ops();
  in_call_ = false;
  if (in_phase_) span().calls.back().call = call;  // now with its answer
}

void SpanRecorder::begin(StepPhase phase, int64_t segment) {
  take_ops();
  Span next = std::exchange(before_, {});
  next.micro_step = micro_step_;
  next.phase = phase;
  next.segment = static_cast<int32_t>(segment);
  next.times = times_;
  next.by_call = in_call_;
  step_.spans.push_back(std::move(next));
  in_phase_ = true;
}

void SpanRecorder::end(StepPhase phase, int64_t) {
  take_ops();
  in_phase_ = false;
  if (phase == StepPhase::kInput) keep_alive_as(MemoryKind::kBatch);
  if (phase == StepPhase::kForward) keep_alive_as(MemoryKind::kActivations);
  if (phase == StepPhase::kCommunication) keep_alive_as(MemoryKind::kGathered);
  if (phase == StepPhase::kRecompute) keep_alive_as(MemoryKind::kRecompute);
}

// Sets the kind of the phase's blocks that are still alive.
void SpanRecorder::keep_alive_as(MemoryKind kind) {
  for (MemoryEvent& event : span().events)
    if (event.bytes > 0 && blocks_.contains(event.id)) event.kind = kind;
}

RecordedStep SpanRecorder::finish() {
  take_ops();
  find_bytes(step_);
  registered_.clear();
  blocks_.clear();
  before_ = {};
  micro_step_ = -1;
  times_ = 1;
  return std::exchange(step_, {});
}

}  // namespace kiln
