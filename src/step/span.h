// What a step does, piece by piece: one span for each phase that it announces, with everything that happens
// until the next one begins. Plans, memory choices and reports are maps over spans.
#pragma once
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/ranks/collective.h"
#include "step/step_observer.h"

namespace kiln {

enum class OpClass { kMatmul, kAttention, kConvolution, kElementwise };  // the last: bound by memory traffic
inline constexpr int kNumOpClasses = 4;
std::string_view name_of(OpClass op_class);  // "matmul"

// One leaf operation: "kiln::affine", "aten::mul", ... An operation that torch composes of others counts as
// these; one with a kernel of its own, and a marked one of Kiln's (ops/op_mark.h), counts whole. So the same
// step gives the same operations on every device. Those that move no data (views, empty) are not recorded.
struct OpRecord {
  std::string name;
  OpClass op_class = OpClass::kElementwise;
  c10::ScalarType dtype = c10::kFloat;  // of the operands of products and attention; elsewhere of the result
  double flops = 0;                     // multiply-adds times two, as executed; 0 for elementwise
  double bytes = 0;                     // read and written, each tensor once
  // A product has its batch in m. Attention has batch * heads, tokens, head dim. Sums have their length in k.
  int64_t m = 0, n = 0, k = 0;
  double seconds = 0;                  // measured; 0 when not timed
  c10::ScalarType from = c10::kFloat;  // what a copy reads; of others the dtype
  // An audit, which looks at the values, fills these in (OpRecorder::Options):
  int64_t num_overflows = 0;  // results that are infinite or NaN where no input was
  double largest = 0;         // magnitude of a finite result in 16 bits
  bool by_call = false;       // a RankCall makes it
};

enum class MemoryKind {
  kWeights,    // in the compute dtype; none where the master has that dtype: it is what computes
  kGradients,  // flat
  kMaster,     // f32
  kMoments,    // of the optimizer
  kEma,
  kConstants,    // untrained weights
  kAutoencoder,  // its weights, which encode images or decode samples
  kTextEncoder,  // its weights, which encode captions
  kFeatureNet,   // the weights that judge samples
  kStaging,      // buffers of what is on a disk: optimizer state, weights
  kGathered,     // whole weights of other ranks' shards, alive while their segment needs them
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
  MemoryKind kind = MemoryKind::kTemporaries;  // of the block; the same on its allocation and its free
  bool by_call = false;                        // a RankCall makes it
};
using MemoryEvents = std::vector<MemoryEvent>;
int64_t peak_bytes(const MemoryEvents& events);  // the most alive at once
int64_t left_bytes(const MemoryEvents& events);  // alive at the end

// A collective begins, or what a rank does next waits for one that has begun.
struct CollectiveEvent {
  size_t before_op = 0;  // of its span
  bool begins = false;
  CollectiveObserver::Start start{};  // of a wait only the number
};

struct Span {
  int64_t micro_step = -1;  // -1: of the step's end
  StepPhase phase{};
  int32_t segment = -1;
  int64_t times = 1;     // that it happens in the step: one of many equal micro-steps stands for all
  bool by_call = false;  // a RankCall announces it
  std::vector<OpRecord> ops{};
  MemoryEvents events{};
  std::vector<CollectiveEvent> collectives{};
  int64_t live_bytes = 0;  // at its end, what lives before and after the step included
  int64_t peak_bytes = 0;  // the most inside it

  struct Call {
    RankCall call;
    bool inside = false;  // the phase; else after it
    size_t before_op = 0, before_event = 0;
  };
  std::vector<Call> calls{};

  bool in_micro_step() const { return micro_step >= 0; }
};

std::vector<OpRecord> ops_of(const std::vector<Span>& spans);  // in order

struct StepMemory {
  std::map<MemoryKind, int64_t> persistent{};  // training state: what lives before and after the step
  int64_t persistent_bytes = 0;
  int64_t peak_bytes = 0;                        // the most live bytes, persistent ones included
  StepPhase peak_phase{};                        // when
  int32_t peak_segment = -1;                     // and whose
  std::map<MemoryKind, int64_t> peak_by_kind{};  // what was alive at the peak; sums to peak_bytes
};

struct RecordedStep {
  std::vector<Span> spans{};  // in order
  StepMemory memory{};
  std::vector<CollectiveEvent> under_way{};  // collectives that began before the first span
};
// Finds the live and most bytes of every span, and the peak of the step, in the events.
void find_bytes(RecordedStep& step);

}  // namespace kiln
