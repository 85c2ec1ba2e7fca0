// What each segment adds to the memory and the work of a step under each memory choice, and the step's peak for any
// mixture of choices: composed from the traces of the uniform ones, equal to the trace of the mixture.
#pragma once
#include <vector>

#include "plan/trace.h"
#include "train/step.h"

namespace kiln {

struct SegmentCosts {
  struct Choice {
    int64_t held_bytes = 0;       // what stays alive from the end of its forward to its backward
    int64_t forward_peak_bytes = 0;   // over what is alive before its forward
    int64_t backward_peak_bytes = 0;  // over what is alive before its backward (recompute included), its own held bytes in
                                      // that
    double recompute_flops = 0;
    int64_t host_bytes = 0;           // pinned, of an offloaded input
  };
  Choice keep, recompute, offload;
};

struct StepCosts {
  std::vector<SegmentCosts> segments;
  int64_t persistent_bytes = 0;
  int64_t other_peak_bytes = 0;  // the most outside the segments' walk (loss, gradient norm, optimizer)
};

// From traces of keep, recompute and, where the device has a host behind it, offload everywhere.
StepCosts step_costs(const TrainOptions& options, const DataShape& data, DryRunDevice device);
int64_t peak_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices);
double recompute_flops(const StepCosts& costs, const std::vector<MemoryChoice>& choices);

// The choices with the fewest recomputed FLOPs (then the least offloaded) whose peak is within `budget_bytes`; empty when none
// is. Exact: a walk over the segments that keeps every undominated (held bytes, FLOPs).
std::vector<MemoryChoice> fit_memory(const StepCosts& costs, int64_t budget_bytes);

}  // namespace kiln
