// What each segment adds to the memory and the work of a step under each memory choice, and the step's peak
// for any mixture of choices: composed from the traces of the uniform ones, equal to the trace of the
// mixture.
#pragma once
#include <array>
#include <vector>

#include "plan/trace/trace.h"
#include "step/step.h"

namespace kiln {

// All bytes of a segment are over what is alive before its forward: its input, and what the segments before
// it hold.
struct SegmentCosts {
  struct Choice {
    int64_t held_bytes = 0;  // more alive after its forward than before, until its backward
    int64_t forward_peak_bytes = 0;
    int64_t recompute_peak_bytes = 0;  // 0 where nothing is recomputed
    int64_t backward_peak_bytes = 0;   // without the next input that comes back meanwhile

    bool operator==(const Choice&) const = default;
  };
  std::array<Choice, 3> choices{};  // by Activations
  int64_t fetched_bytes =
      0;  // of its input, were it offloaded: alive from the backward of the segment after it

  const Choice& of(Activations activations) const { return choices[static_cast<size_t>(activations)]; }
  bool operator==(const SegmentCosts&) const = default;
};

// One micro-batch: forward and backward.
struct WalkCosts {
  int64_t live_bytes = 0;  // before the first segment's forward
  std::vector<SegmentCosts> segments;
  int64_t loss_peak_bytes = 0;  // over what is alive after the last segment's forward

  bool operator==(const WalkCosts&) const = default;
};

struct StepCosts {
  std::vector<WalkCosts>
      walks;  // those of a step that differ; of equal ones the one with the most alive before it
  std::vector<double> recompute_flops;  // of each segment, in the whole step
  std::vector<int64_t> host_bytes;      // of each segment, were it offloaded: pinned
  int64_t persistent_bytes = 0;
  int64_t other_peak_bytes = 0;  // the most outside the walks (input, gradient norm, optimizer)
  bool can_offload = false;      // the device has a host behind it

  size_t num_segments() const { return recompute_flops.size(); }
};

// From traces of keep, recompute and, where the device has a host behind it, offload everywhere; their memory
// choices in `options` are ignored. Throws Error for options that cannot be trained.
// The traces are of one of `world_size` ranks.
StepCosts step_costs(const TrainOptions& options, const DataShape& data, DryRunDevice device,
                     int64_t world_size = 1);
// From such traces themselves, in this order; without the last there is nothing to offload.
StepCosts step_costs(const std::vector<const StepTrace*>& uniform);

// The operations of a step with such choices, of the traces of keep and recompute everywhere; without its
// memory.
StepTrace mixed_ops(const StepTrace& keep, const StepTrace& recompute,
                    const std::vector<MemoryChoice>& choices);

// The peak, the work and the host memory of a step with one choice per segment.
int64_t peak_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices);
double recompute_flops(const StepCosts& costs, const std::vector<MemoryChoice>& choices);
int64_t host_bytes(const StepCosts& costs, const std::vector<MemoryChoice>& choices);

// The choices with the fewest recomputed FLOPs (then the least offloaded) whose peak is within
// `budget_bytes`; empty when none is. Exact: a walk over the segments that keeps every undominated (held
// bytes, FLOPs).
std::vector<MemoryChoice> fit_memory(const StepCosts& costs, int64_t budget_bytes);
// The lowest peak that any choices have.
int64_t smallest_peak_bytes(const StepCosts& costs);

}  // namespace kiln
