#include "train/memory_recorder.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>

#include "core/scratch.h"

namespace kiln {

std::string_view name_of(MemoryKind kind) {
  constexpr std::string_view kNames[kNumMemoryKinds] = {
      "weights",  "gradients", "master",      "moments",   "ema",       "constants", "autoencoder", "staging",
      "gathered", "batch",     "activations", "recompute", "attention", "matmul",    "temporaries"};
  return kNames[static_cast<size_t>(kind)];
}

void visit_unit(const FlatUnit& unit, const StateVisitor& visitor) {
  const auto visit = [&](const at::Tensor& tensor, MemoryKind kind) {
    if (tensor.defined()) visitor(tensor, kind);
  };
  visit(unit.master, MemoryKind::kMaster);
  for (const at::Tensor& weights : {unit.compute_weights, unit.weight_shard})
    visit(weights, MemoryKind::kWeights);
  for (const at::Tensor& grads : {unit.grads, unit.grad_shard}) visit(grads, MemoryKind::kGradients);
  for (const at::Tensor& moment : unit.moments) visit(moment, MemoryKind::kMoments);
  for (const at::Tensor& ema : unit.emas) visit(ema, MemoryKind::kEma);
}

void visit_state(const TrainingState& state, const StateVisitor& visitor) {
  for (const auto& segment : state.segments) visit_unit(segment.unit, visitor);
  for (const auto& constant : state.constants) visitor(constant->value, MemoryKind::kConstants);
  if (state.nvme)
    for (const at::Tensor& buffer : state.nvme->buffers()) visitor(buffer, MemoryKind::kStaging);
}

void MemoryRecorder::register_tensor(const at::Tensor& tensor, MemoryKind kind) {
  const uint64_t id = block_id(tensor);
  const auto bytes = static_cast<int64_t>(id ? tensor.storage().nbytes() : 0);
  if (bytes == 0 || !registered_.emplace(id, bytes).second) return;
  memory_.persistent[kind] += bytes;
  memory_.persistent_bytes += bytes;
}

void MemoryRecorder::register_unit(const FlatUnit& unit) {
  visit_unit(unit, [this](const at::Tensor& tensor, MemoryKind kind) { register_tensor(tensor, kind); });
}

void MemoryRecorder::register_state(const TrainingState& state) {
  visit_state(state, [this](const at::Tensor& tensor, MemoryKind kind) { register_tensor(tensor, kind); });
  phase_peak_bytes_ = live_bytes();
}

void MemoryRecorder::allocated(uint64_t id, size_t bytes) {
  if (bytes == 0 || std::this_thread::get_id() != thread_) return;
  const ScratchUse scratch = current_scratch();
  blocks_[id] = {.event = memory_.events.size(), .scratch_scope = scratch.scope};
  memory_.events.push_back({.id = id,
                            .bytes = static_cast<int64_t>(bytes),
                            .phase = phase_,
                            .segment = segment_,
                            .kind = MemoryKind::kTemporaries});
  step_bytes_ += static_cast<int64_t>(bytes);
  phase_peak_bytes_ = std::max(phase_peak_bytes_, live_bytes());
}

void MemoryRecorder::freed(uint64_t id, size_t bytes) {
  if (bytes == 0 || std::this_thread::get_id() != thread_) return;
  const auto block = blocks_.find(id);
  if (block == blocks_.end()) return;  // older than the recording
  MemoryEvent& made = memory_.events[block->second.event];
  const ScratchUse scratch = current_scratch();
  if (scratch.scratch != Scratch::kNone && scratch.scope == block->second.scratch_scope)
    made.kind = scratch.scratch == Scratch::kAttention ? MemoryKind::kAttention : MemoryKind::kMatmul;
  blocks_.erase(block);
  step_bytes_ -= static_cast<int64_t>(bytes);
  memory_.events.push_back({.id = id,
                            .bytes = -static_cast<int64_t>(bytes),
                            .phase = phase_,
                            .segment = segment_,
                            .kind = made.kind});
}

void MemoryRecorder::begin(StepPhase phase, int64_t segment) {
  phase_ = phase;
  segment_ = static_cast<int32_t>(segment);
  if (!memory_.marks.empty()) phase_begin_ = memory_.events.size();
  phase_peak_bytes_ = live_bytes();
}

void MemoryRecorder::end(StepPhase phase, int64_t segment) {
  if (phase == StepPhase::kInput) keep_alive_as(MemoryKind::kBatch);
  if (phase == StepPhase::kForward) keep_alive_as(MemoryKind::kActivations);
  if (phase == StepPhase::kCommunication) keep_alive_as(MemoryKind::kGathered);
  if (phase == StepPhase::kRecompute) keep_alive_as(MemoryKind::kRecompute);
  memory_.marks.push_back({.phase = phase,
                           .segment = static_cast<int32_t>(segment),
                           .live_bytes = live_bytes(),
                           .peak_bytes = phase_peak_bytes_});
  phase_begin_ = memory_.events.size();
  phase_peak_bytes_ = live_bytes();
  segment_ = -1;
}

// The phase's blocks that are still alive are of `kind`.
void MemoryRecorder::keep_alive_as(MemoryKind kind) {
  for (size_t i = phase_begin_; i < memory_.events.size(); ++i) {
    MemoryEvent& event = memory_.events[i];
    if (event.bytes > 0 && blocks_.contains(event.id)) event.kind = kind;
  }
}

// Walks the events to the first moment of the highest sum.
void find_peak(StepMemory& memory) {
  int64_t live = memory.persistent_bytes;
  size_t last = 0;
  memory.peak_bytes = live;
  for (size_t i = 0; i < memory.events.size(); ++i) {
    live += memory.events[i].bytes;
    if (live <= memory.peak_bytes) continue;
    memory.peak_bytes = live;
    memory.peak_phase = memory.events[i].phase;
    memory.peak_segment = memory.events[i].segment;
    last = i + 1;
  }
  memory.peak_by_kind = memory.persistent;
  for (size_t i = 0; i < last; ++i) memory.peak_by_kind[memory.events[i].kind] += memory.events[i].bytes;
  std::erase_if(memory.peak_by_kind, [](const auto& entry) { return entry.second == 0; });
}

StepMemory MemoryRecorder::finish() {
  find_peak(memory_);
  registered_.clear();
  blocks_.clear();
  phase_begin_ = 0;
  step_bytes_ = phase_peak_bytes_ = 0;
  phase_ = StepPhase::kInput;
  segment_ = -1;
  return std::exchange(memory_, {});
}

}  // namespace kiln
