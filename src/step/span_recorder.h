// Records the spans of a step. The same recorder sits on the meta allocator when a step is planned and on the
// CPU allocator when one is measured, so both give numbers of the same form.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <thread>
#include <unordered_map>

#include "core/allocations.h"
#include "step/span.h"

namespace kiln {

class TrainingState;

// Calls visitor(tensor, kind) for every defined tensor that lives before and after a step. This is the only
// list of them. Some share a storage (a master that is also the compute weights); some have no memory at the
// time (whole weights between their uses).
using StateVisitor = std::function<void(const at::Tensor& tensor, MemoryKind kind)>;
void visit_state(const TrainingState& state, const StateVisitor& visitor);

// Use for one step: construct, register_state, attach to the allocator (MetaAllocationScope or
// observe_cpu_allocations), to the step (TrainStep::observe) and, for its collectives, to the group; run,
// detach, finish. What happens before the first phase is counted in that phase. Records only blocks that the
// constructing thread allocates and frees.
class SpanRecorder : public AllocationObserver, public StepObserver, public CollectiveObserver {
 public:
  // With null `ops`, operations are not recorded. REQUIRES: `ops` outlives this.
  explicit SpanRecorder(OpRecorder* ops = nullptr) : ops_(ops) {}

  // Counts the persistent blocks by kind. A shared storage counts once; buffers without memory of their own
  // are left out.
  void register_state(const TrainingState& state);
  // Counts one more persistent tensor.
  void register_tensor(const at::Tensor& tensor, MemoryKind kind);
  // Counts a tensor whose memory is a mapped file's, not the allocator's. Ignores other tensors.
  void register_mapped(const at::Tensor& tensor, MemoryKind kind);

  void allocated(uint64_t id, size_t bytes) override;
  void freed(uint64_t id, size_t bytes) override;
  void begin_micro_step(int64_t index) override { micro_step_ = index; }
  void end_micro_step() override { micro_step_ = -1; }
  void begin_call(const RankCall& call) override;
  void end_call(const RankCall& call) override;
  void begin(StepPhase phase, int64_t segment) override;
  void end(StepPhase phase, int64_t segment) override;
  void started(const Start& start) override { add({.begins = true, .start = start}); }
  void waited(int64_t number) override { add({.start = {.number = number}}); }

  // Makes each span that begins from here on stand for `times` equal ones.
  void stand_for(int64_t times) { times_ = times; }
  // Returns the span of the current phase, or the last one. REQUIRES: a phase has begun.
  Span& span() { return step_.spans.back(); }

  // Returns what was recorded and empties the recorder.
  RecordedStep finish();

 private:
  void add_persistent(int64_t bytes, MemoryKind kind);
  struct LiveBlock {
    size_t span = 0, event = 0;  // of its allocation
    uint64_t scratch_scope = 0;
  };
  Span& receiver() { return step_.spans.empty() ? before_ : step_.spans.back(); }
  void take_ops();
  void add(CollectiveEvent event);
  void keep_alive_as(MemoryKind kind);

  OpRecorder* ops_;
  RecordedStep step_;
  Span before_;  // what happens before the first phase
  int64_t micro_step_ = -1, times_ = 1;
  bool in_phase_ = false, in_call_ = false;
  std::unordered_map<uint64_t, int64_t> registered_;  // block id -> bytes
  std::unordered_map<uint64_t, LiveBlock> blocks_;    // the step's blocks that are alive
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace kiln
