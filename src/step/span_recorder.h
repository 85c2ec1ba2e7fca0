// Writes the spans of a step: the same recorder sits on the meta allocator when a step is planned and on the
// CPU allocator when one is measured, so that both give the same shape of numbers.
#pragma once
#include <functional>
#include <thread>
#include <unordered_map>

#include "core/allocations.h"
#include "step/span.h"
#include "step/training_state.h"

namespace kiln {

// Calls visitor(tensor, kind) for every tensor that lives before and after a step and is not undefined: the
// one list of them. Some share a storage (a master that is also the compute weights), some have no memory
// at the time (whole weights between their uses).
using StateVisitor = std::function<void(const at::Tensor& tensor, MemoryKind kind)>;
void visit_state(const TrainingState& state, const StateVisitor& visitor);

// Where a recorder has operations from.
class OpSource {
 public:
  virtual ~OpSource() = default;
  virtual size_t num_recorded() const = 0;  // since the last take()
  virtual std::vector<OpRecord> take() = 0;
};

// Attach for one step: construct, register_state, attach to the allocator (MetaAllocationScope or
// observe_cpu_allocations), to the step (TrainStep::observe) and, for its collectives, to the group; run,
// detach, finish. What happens before the first phase counts to that phase. Only blocks that the constructing
// thread allocates and frees are recorded.
class SpanRecorder : public AllocationObserver, public StepObserver, public CollectiveObserver {
 public:
  // `ops`: null: operations are not recorded. REQUIRES: it outlives this.
  explicit SpanRecorder(OpSource* ops = nullptr) : ops_(ops) {}

  // The persistent blocks, by kind. Shared storages count once; buffers without memory of their own are left
  // out.
  void register_state(const TrainingState& state);
  // One more persistent tensor.
  void register_tensor(const at::Tensor& tensor, MemoryKind kind);
  // One whose memory is not the allocator's: a mapped file's. Nothing for others.
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

  // Spans that begin from here on stand for so many.
  void stand_for(int64_t times) { times_ = times; }
  // The span that the phase under way writes, or the last one. REQUIRES: a phase has begun.
  Span& span() { return step_.spans.back(); }

  // What was recorded; the recorder is empty afterwards.
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

  OpSource* ops_;
  RecordedStep step_;
  Span before_;  // what happens before the first phase
  int64_t micro_step_ = -1, times_ = 1;
  bool in_phase_ = false, in_call_ = false;
  std::unordered_map<uint64_t, int64_t> registered_;  // id -> bytes
  std::unordered_map<uint64_t, LiveBlock> blocks_;    // of the step, alive
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace kiln
