// Real training steps, timed: what calibration learns from and what predictions are compared with.
#pragma once
#include <vector>

#include "plan/op_recorder.h"
#include "train/setup.h"

namespace kiln {

struct StepTiming {
  double seconds = 0;         // of one step, nobody watching: the median
  double least_seconds = 0;   // and the least: what other programs on the machine disturbed least
  std::vector<OpRecord> ops;  // of one step; seconds: the least of each operation
};

// Trains `options` on random data: after one step of warm-up, `repeats` steps by the clock and, when
// `with_ops`, as many operation by operation. Throws Error, also when no step can be applied (fp16 that
// overflows for ever).
StepTiming time_steps(const TrainOptions& options, at::Device device, int repeats, bool with_ops);

}  // namespace kiln
