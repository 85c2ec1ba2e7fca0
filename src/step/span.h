// What a step does, piece by piece. There is one span for each phase that the step announces; it holds
// everything that happens until the next phase begins. Plans, memory choices and reports are computed from
// spans.
#pragma once
#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "ops/op_recorder.h"
#include "parallel/ranks/collective.h"
#include "step/step_observer.h"

namespace kiln {

enum class MemoryKind {
  kWeights,    // in the compute dtype; none if the master has that dtype and computes itself
  kGradients,  // flat
  kMaster,     // f32
  kMoments,    // of the optimizer
  kEma,
  kConstants,    // untrained weights
  kAutoencoder,  // weights of the autoencoder, which encodes images or decodes samples
  kTextEncoder,  // weights of the text encoder, which encodes captions
  kFeatureNet,   // weights of the net that judges samples
  kStaging,      // buffers for what is on a disk: optimizer state, weights
  kGathered,     // whole weights gathered from the ranks' shards, alive while their segment needs them
  kBatch,        // the batch on the device, noised
  kActivations,  // made in a forward, alive after its segment's forward
  kRecompute,    // activations that a backward made again
  kAttention,    // scratch of attention
  kMatmul,       // scratch of matrix products
  kTemporaries,  // everything else
};
inline constexpr int kNumMemoryKinds = 17;
std::string_view name_of(MemoryKind kind);  // "weights"

// One allocation (bytes > 0) or free (bytes < 0, the same id).
struct MemoryEvent {
  uint64_t id = 0;
  int64_t bytes = 0;
  MemoryKind kind = MemoryKind::kTemporaries;  // of the block; the same in its allocation and its free
  bool by_call = false;                        // a RankCall makes it
};
using MemoryEvents = std::vector<MemoryEvent>;
int64_t peak_bytes(const MemoryEvents& events);  // the most alive at once
int64_t left_bytes(const MemoryEvents& events);  // alive at the end

// A collective begins, or the rank waits for one that has begun.
struct CollectiveEvent {
  size_t before_op = 0;  // of its span
  bool begins = false;
  CollectiveObserver::Start start{};  // for a wait, only the number is set
};

struct Span {
  int64_t micro_step = -1;  // -1: at the end of the step
  StepPhase phase{};
  int32_t segment = -1;
  int64_t times = 1;     // how often it happens in the step; one span stands for many equal micro-steps
  bool by_call = false;  // a RankCall announces it
  std::vector<OpRecord> ops{};
  MemoryEvents events{};
  std::vector<CollectiveEvent> collectives{};
  int64_t live_bytes = 0;  // live bytes at its end, with those that live before and after the step
  int64_t peak_bytes = 0;  // the most inside it

  struct Call {
    RankCall call;
    bool inside = false;  // true: inside the phase; false: after it
    size_t before_op = 0, before_event = 0;
  };
  std::vector<Call> calls{};

  bool in_micro_step() const { return micro_step >= 0; }
};

std::vector<OpRecord> ops_of(const std::vector<Span>& spans);  // in order

struct StepMemory {
  std::map<MemoryKind, int64_t> persistent{};  // training state, which lives before and after the step
  int64_t persistent_bytes = 0;
  int64_t peak_bytes = 0;                        // the most live bytes, persistent ones included
  StepPhase peak_phase{};                        // when the peak is reached
  int32_t peak_segment = -1;                     // the segment of that moment
  std::map<MemoryKind, int64_t> peak_by_kind{};  // what was alive at the peak; sums to peak_bytes
};

struct RecordedStep {
  std::vector<Span> spans{};  // in order
  StepMemory memory{};
  std::vector<CollectiveEvent> under_way{};  // collectives that began before the first span
};
// Computes the live and peak bytes of every span, and the peak of the step, from the events.
void find_bytes(RecordedStep& step);

}  // namespace kiln
