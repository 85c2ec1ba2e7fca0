// Memory of a step by kind and over time, seen from the allocator. The same recorder sits on the meta
// allocator when a step is planned and on the CPU allocator when one is measured: both give the same shape of
// numbers.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/allocations.h"
#include "train/step_observer.h"
#include "train/training_state.h"

namespace kiln {

enum class MemoryKind {
  kWeights,    // in the compute dtype; none where that is f32: the master is what computes
  kGradients,  // flat
  kMaster,     // f32
  kMoments,    // of the optimizer
  kEma,
  kConstants,    // untrained weights
  kAutoencoder,  // its weights, which encode images or decode samples
  kStaging,      // buffers of what is on a disk: optimizer state, weights
  kGathered,     // whole weights of other ranks' shards, alive while their segment needs them
  kBatch,        // the batch on the device, noised
  kActivations,  // made in a forward, alive after its segment's forward
  kRecompute,    // activations that a backward made again
  kAttention,    // scratch of attention
  kMatmul,       // scratch of matrix products
  kTemporaries,  // everything else
};
inline constexpr int kNumMemoryKinds = 15;
std::string_view name_of(MemoryKind kind);  // "weights"

// Calls visitor(tensor, kind) for every tensor that lives before and after a step and is not undefined: the
// one list of them. Some share a storage (a master that is also the compute weights), some have no memory
// at the time (whole weights between their uses).
using StateVisitor = std::function<void(const at::Tensor& tensor, MemoryKind kind)>;
void visit_unit(const FlatUnit& unit, const StateVisitor& visitor);
void visit_state(const TrainingState& state, const StateVisitor& visitor);

// One allocation (bytes > 0) or free (bytes < 0, the same id).
struct MemoryEvent {
  uint64_t id = 0;
  int64_t bytes = 0;
  StepPhase phase{};
  int32_t segment = -1;
  MemoryKind kind{};  // of the block; the same on its allocation and its free
};

// A boundary of a phase, for the curve of memory over the step.
struct MemoryMark {
  StepPhase phase{};
  int32_t segment = -1;
  int64_t live_bytes = 0;  // at its end
  int64_t peak_bytes = 0;  // the most inside it
};

struct StepMemory {
  std::map<MemoryKind, int64_t> persistent;  // training state: what lives before and after the step
  int64_t persistent_bytes = 0;
  int64_t peak_bytes = 0;                      // the most live bytes, persistent ones included
  StepPhase peak_phase{};                      // when
  int32_t peak_segment = -1;                   // and whose
  std::map<MemoryKind, int64_t> peak_by_kind;  // what was alive at the peak; sums to peak_bytes
  std::vector<MemoryMark> marks;               // in order
  std::vector<MemoryEvent> events;             // in order
};

// Finds peak_bytes, where and of what, in `events`.
void find_peak(StepMemory& memory);

// Attach for one step: construct, register_state, attach to the allocator (MetaAllocationScope or
// observe_cpu_allocations) and to the step (TrainStep::observe), run, detach, finish. What is allocated
// before the step's first phase counts to its input. Only blocks that the constructing thread allocates and
// frees are recorded.
class MemoryRecorder : public AllocationObserver, public StepObserver {
 public:
  // The persistent blocks, by kind. Shared storages count once; buffers without memory of their own are left
  // out.
  void register_state(const TrainingState& state);
  void register_unit(const FlatUnit& unit);
  // One more persistent tensor.
  void register_tensor(const at::Tensor& tensor, MemoryKind kind);

  void allocated(uint64_t id, size_t bytes) override;
  void freed(uint64_t id, size_t bytes) override;
  void begin(StepPhase phase, int64_t segment) override;
  void end(StepPhase phase, int64_t segment) override;

  // What was recorded; the recorder is empty afterwards.
  StepMemory finish();

 private:
  struct LiveBlock {
    size_t event = 0;  // of its allocation
    uint64_t scratch_scope = 0;
  };
  int64_t live_bytes() const { return memory_.persistent_bytes + step_bytes_; }
  void keep_alive_as(MemoryKind kind);

  StepMemory memory_;
  std::unordered_map<uint64_t, int64_t> registered_;  // id -> bytes
  std::unordered_map<uint64_t, LiveBlock> blocks_;    // of the step, alive
  size_t phase_begin_ = 0;                            // first event of the phase
  int64_t step_bytes_ = 0, phase_peak_bytes_ = 0;
  StepPhase phase_ = StepPhase::kInput;
  int32_t segment_ = -1;
  std::thread::id thread_ = std::this_thread::get_id();
};

}  // namespace kiln
