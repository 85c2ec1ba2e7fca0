// Who watches a step from inside: timers of the monitor, the recorder of memory, the plan. The step announces
// what it is doing; nothing is passed when nobody watches.
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
};
inline constexpr int kNumStepPhases = 9;
std::string_view name_of(StepPhase phase);  // "forward"

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Phases follow one another and never nest. `segment`: index into Denoiser::segments(), -1 = none.
  virtual void begin(StepPhase phase, int64_t segment) = 0;
  virtual void end(StepPhase phase, int64_t segment) = 0;
};

// Announces a phase to `observer` while this lives; null: nobody watches.
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

}  // namespace kiln
