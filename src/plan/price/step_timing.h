// Times real training steps. Calibration learns from them, and predictions are compared with them.
#pragma once
#include <vector>

#include "step/span.h"
#include "train/setup.h"

namespace kiln {

// A training run on random data, one step at a time.
class TimedTraining {
 public:
  TimedTraining(const TrainOptions& options, const DataShape& data, at::Device device);

  // Runs a step and returns its seconds. While the loss scale is still too high, steps are skipped and run
  // again. Throws Error if it stays too high.
  double step();
  void observe(StepObserver* observer) { training_.step->observe(observer); }

 private:
  at::Device device_;
  double lr_;
  Training training_;
  StepBatch batch_;
};

struct StepTiming {
  double seconds = 0;        // median of one step without an observer
  double least_seconds = 0;  // the least of one, which other programs on the machine disturbed least
  std::vector<Span> spans;   // one step; OpRecord::seconds is the least of each operation
  bool is_done = true;       // false: there was no time for one step of each kind
};

struct StepRepeats {
  int plain = 3;             // steps by the clock, at least one
  int watched = 0;           // steps operation by operation; 0: no spans
  double least_seconds = 0;  // plain steps go on until they have taken this long
  int warm_up = 1;           // steps before all of these
  // The limit on all of it, with building the model; 0: no limit. Repetitions are left out if they would not
  // fit, judged by the step before them.
  double most_seconds = 0;
};

// Trains `options` on random data of this shape. Throws Error, also if no step can be applied (fp16 that
// overflows for ever).
StepTiming time_steps(const TrainOptions& options, const DataShape& data, at::Device device,
                      const StepRepeats& repeats);
// Does the same on data of synthetic_shape().
StepTiming time_steps(const TrainOptions& options, at::Device device, const StepRepeats& repeats);

}  // namespace kiln
