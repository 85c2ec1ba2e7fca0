// Real training steps, timed: what calibration learns from and what predictions are compared with.
#pragma once
#include <vector>

#include "step/span.h"
#include "train/setup.h"

namespace kiln {

// A training run on random data, one step at a time.
class TimedTraining {
 public:
  TimedTraining(const TrainOptions& options, const DataShape& data, at::Device device);

  // Seconds of one step that was applied: a loss scale that is still too high skips a few first. Throws Error
  // when it stays too high.
  double step();
  void observe(StepObserver* observer) { training_.step->observe(observer); }

 private:
  at::Device device_;
  double lr_;
  Training training_;
  StepBatch batch_;
};

struct StepTiming {
  double seconds = 0;        // of one step, nobody watching: the median
  double least_seconds = 0;  // and the least: what other programs on the machine disturbed least
  std::vector<Span> spans;   // of one step; OpRecord::seconds: the least of each operation
  bool is_done = true;       // false: there was no time for one step of each kind
};

struct StepRepeats {
  int plain = 3;             // steps by the clock, at least one
  int watched = 0;           // steps operation by operation; 0: no spans
  double least_seconds = 0;  // more plain ones until they have taken so long
  int warm_up = 1;           // steps before all that
  // Of all that, with building the model; 0: no limit. Repetitions that do not fit, by what the step before
  // them took, are left out.
  double most_seconds = 0;
};

// Trains `options` on random data of this shape. Throws Error, also when no step can be applied (fp16 that
// overflows for ever).
StepTiming time_steps(const TrainOptions& options, const DataShape& data, at::Device device,
                      const StepRepeats& repeats);
// On data of synthetic_shape().
StepTiming time_steps(const TrainOptions& options, at::Device device, const StepRepeats& repeats);

}  // namespace kiln
