// The memory of a planned run: by phase and kind, in each place. What one rank's device holds in each phase
// is played from the trace of the step and of what is outside of it, one after another.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "plan/price/machine_profile.h"
#include "plan/trace/trace.h"
#include "watch/prediction.h"

namespace kiln {

// Bytes in each place, of one rank.
struct Footprint {
  int64_t device = 0, host = 0, pinned_host = 0, nvme = 0;
};

struct PhasePlan {
  std::string name;        // load, first step, steady step, validation, validation sampling, checkpoint, ...
  int64_t live_bytes = 0;  // the most of tensors on the device
  Footprint bytes;         // at its peak, with all that is no tensor; on a CPU everything is on the device
};

struct MemoryPlan {
  std::vector<PhasePlan> phases;
  // What is alive on one rank's device at the peak of the steady step, in bytes: MemoryKind's names,
  // autoencoder, and gathered (whole weights and gradients on their way among ranks). Sums to peak_bytes.
  std::map<std::string, int64_t> by_kind;
  std::map<std::string, int64_t> overhead;  // beside it: context, communication (NCCL), allocator
  int64_t peak_bytes = 0;                   // live allocated bytes at the peak of the steady step
  int64_t reserved_bytes = 0;               // with the caching allocator's rounding and fragmentation (CUDA)
  int64_t needed_bytes = 0;                 // of the device, over all phases: reserved and context
  std::string needed_phase;                 // which of `phases` that is
  std::string peak_phase, peak_segment;     // of the steady step: "backward", "blocks.27"
  bool fits = false;
  MemoryCurve curve;               // of memory by kind over the step
  std::vector<std::string> notes;  // what this plan leaves out
};

// `trace`: of the run's step, on one of its ranks.
MemoryPlan plan_memory(const MachineProfile& machine, const DataShape& data, const StepTrace& trace);

// Outside the allocator, on the device of each of so many ranks.
int64_t communication_bytes(const MachineProfile& machine, int64_t gpus);

}  // namespace kiln
