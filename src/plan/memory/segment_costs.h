// The memory and work that each segment adds to a step under each memory choice, and the step's peak for any
// mixture of choices. They are composed from traces in which all segments have the same choice, and equal
// what a trace of the mixture would say.
#pragma once
#include <array>
#include <vector>

#include "plan/trace/trace.h"
#include "step/step.h"

namespace kiln {

// All bytes of a segment are beyond what is alive before its forward: its input, and what the segments before
// it hold.
struct SegmentCosts {
  struct Choice {
    int64_t held_bytes = 0;  // that its forward adds, until its backward
    int64_t forward_peak_bytes = 0;
    int64_t recompute_peak_bytes = 0;  // 0 where nothing is recomputed
    // Without the input of the segment before, which may come back meanwhile.
    int64_t backward_peak_bytes = 0;

    bool operator==(const Choice&) const = default;
  };
  std::array<Choice, 3> choices{};  // by Activations
  // Bytes of its input if it is offloaded: alive from the backward of the segment after it.
  int64_t fetched_bytes = 0;

  const Choice& of(Activations activations) const { return choices[static_cast<size_t>(activations)]; }
  bool operator==(const SegmentCosts&) const = default;
};

// Costs of one micro-batch, forward and backward.
struct WalkCosts {
  int64_t live_bytes = 0;  // before the first segment's forward
  std::vector<SegmentCosts> segments;
  int64_t loss_peak_bytes = 0;  // beyond what is alive after the last segment's forward

  bool operator==(const WalkCosts&) const = default;
};

struct StepCosts {
  // The walks of a step that differ. Of equal ones, the one with the most alive before it.
  std::vector<WalkCosts> walks;
  std::vector<double> recompute_flops;  // of each segment, in the whole step
  std::vector<int64_t> host_bytes;      // pinned, of each segment if it is offloaded
  int64_t persistent_bytes = 0;
  int64_t other_peak_bytes = 0;  // the most outside the walks (input, gradient norm, optimizer)
  bool can_offload = false;      // the device has a host behind it

  size_t num_segments() const { return recompute_flops.size(); }
};

// Computes the costs from traces that keep, recompute and, if the device has a host behind it, offload every
// segment. The traces are of one of `world_size` ranks; memory choices in `options` are ignored. Throws Error
// for options that cannot be trained.
StepCosts step_costs(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size = 1);
// Computes the costs from such traces, in this order. Without the third one nothing can be offloaded.
StepCosts step_costs(const std::vector<const StepTrace*>& uniform);

// Returns the operations of a step with such choices, from the traces that keep and that recompute every
// segment. The result has no memory events.
StepTrace mixed_ops(const StepTrace& keep, const StepTrace& recompute,
                    const std::vector<MemoryChoice>& choices);

// These return the peak, the recomputed FLOPs and the host memory of a step with one choice per segment.
int64_t peak_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices);
double recompute_flops(const StepCosts& costs, const std::vector<MemoryChoice>& choices);
int64_t host_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices);

// Returns the choices with the fewest recomputed FLOPs (then the least offloaded) whose peak is within
// `budget_bytes`; empty if there are none. The result is exact: a walk over the segments keeps every
// undominated (held bytes, FLOPs).
std::vector<MemoryChoice> fit_memory(const StepCosts& costs, int64_t budget_bytes);
// Returns the lowest peak that any choices have.
int64_t smallest_peak_bytes(const StepCosts& costs);

}  // namespace kiln
