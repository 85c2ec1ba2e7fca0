// Interface for what watches a step from inside, such as the monitor's timers and the span recorder. The step
// announces each thing that it does; it announces nothing when nobody watches.
#pragma once
#include <cstdint>
#include <string_view>

namespace kiln {

enum class StepPhase {
  kInput,          // slices of the batch go to the device, noise is added
  kForward,        // of one segment
  kLoss,           // and the gradient of the prediction
  kRecompute,      // one segment's forward again, inside backward
  kBackward,       // of one segment
  kGradNorm,       // and the one read of the step's numbers
  kOptimizer,      // of one segment's unit
  kCommunication,  // waiting for other ranks
  kOffload,        // waiting for optimizer state, gradients and weights on their way to and from the host
  kGraph,          // a micro-batch's whole walk as one graph of the device
};
inline constexpr int kNumStepPhases = 10;
// "forward"
inline std::string_view name_of(StepPhase phase) {
  constexpr std::string_view kNames[kNumStepPhases] = {"input",    "forward",   "loss",      "recompute",
                                                       "backward", "grad_norm", "optimizer", "communication",
                                                       "offload",  "graph"};
  return kNames[static_cast<size_t>(phase)];
}

// A call of the step whose work depends on this rank's share of the training state (step/rank_work.h).
struct RankCall {
  enum class Kind {
    kGather,
    kRelease,
    kBeginGradients,
    kReduce,
    kFinishReductions,
    kSumOfSquares,
    kReadAhead,
    kUpdateAhead,
    kUpdate
  };
  Kind kind{};
  size_t segment = 0;             // for the first four kinds
  int direction = 0;              // kGather: 1 or -1
  bool first_micro_step = false;  // kBeginGradients, kReduce
  bool last_micro_step = false;   // kReduce
  bool adds = false;              // what kBeginGradients returned
  int64_t num_losses = 0;         // kUpdateAhead
};

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Enclose one micro-batch's way through the model. Phases outside of these belong to the step's end.
  virtual void begin_micro_step(int64_t) {}
  virtual void end_micro_step() {}
  // Calls never nest. They happen inside a phase, or contain phases of their own.
  virtual void begin_call(const RankCall&) {}
  virtual void end_call(const RankCall&) {}
  // Phases follow one another and never nest. `segment`: index into Denoiser::segments(), -1 = none.
  virtual void begin(StepPhase phase, int64_t segment) = 0;
  virtual void end(StepPhase phase, int64_t segment) = 0;
};

// Announces a phase to `observer` for as long as this lives. A null observer hears nothing.
class PhaseScope {
 public:
  PhaseScope(StepObserver* observer, StepPhase phase, int64_t segment = -1)
      : observer_(observer), phase_(phase), segment_(segment) {
    if (observer_) observer_->begin(phase_, segment_);
  }
  ~PhaseScope() {
    if (observer_) observer_->end(phase_, segment_);
  }
  PhaseScope(const PhaseScope&) = delete;

 private:
  StepObserver* observer_;
  StepPhase phase_;
  int64_t segment_;
};

// The same for a micro-step.
class MicroStepScope {
 public:
  MicroStepScope(StepObserver* observer, int64_t index) : observer_(observer) {
    if (observer_) observer_->begin_micro_step(index);
  }
  ~MicroStepScope() {
    if (observer_) observer_->end_micro_step();
  }
  MicroStepScope(const MicroStepScope&) = delete;

 private:
  StepObserver* observer_;
};

}  // namespace kiln
