// The memory of a planned run by phase, kind and place. The traces of the step and of what is outside of it
// are played one after another to see what one rank's device holds in each phase.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "plan/price/machine_profile.h"
#include "plan/trace/trace.h"
#include "watch/prediction.h"

namespace kiln {

// Bytes of one rank in each place.
struct Footprint {
  int64_t device = 0, host = 0, pinned_host = 0, nvme = 0;
};

struct PhasePlan {
  std::string name;        // load, first step, steady step, validation, validation sampling, checkpoint, ...
  int64_t live_bytes = 0;  // most bytes of tensors on the device
  Footprint bytes;         // at the peak, also of all that is no tensor; on a CPU everything is on the device
};

struct MemoryPlan {
  std::vector<PhasePlan> phases;
  // Bytes alive on one rank's device at the peak of the steady step, by name of MemoryKind. They sum to
  // peak_bytes.
  std::map<std::string, int64_t> by_kind;
  std::map<std::string, int64_t> overhead;  // bytes beside it: context, communication (NCCL), allocator
  int64_t peak_bytes = 0;                   // live allocated bytes at the peak of the steady step
  int64_t reserved_bytes = 0;  // the same with the caching allocator's rounding and fragmentation (CUDA)
  int64_t needed_bytes = 0;    // most that any phase needs of the device, with context and communication
  std::string needed_phase;    // the one of `phases` that needs it
  std::string peak_phase, peak_segment;  // of the steady step: "backward", "blocks.27"
  std::string attention;  // the engine of packed attention on a GPU (plan/price/attention_engine.h)
  bool fits = false;
  MemoryCurve curve;               // memory by kind over the step
  std::vector<std::string> notes;  // what this plan leaves out or assumes
};

// `trace`: the run's step on one of its ranks. `validation_images`: those that a validation takes; 0: not
// known.
MemoryPlan plan_memory(const MachineProfile& machine, const DataDescription& data, int64_t validation_images,
                       const StepTrace& trace);

// Returns where a rank's part of a checkpoint is copied to before it is written.
CheckpointCopy planned_checkpoint_copy(const TrainOptions& options, DryRunDevice device);

// Returns the bytes of NCCL outside the allocator, on the device of each of `gpus` ranks.
int64_t communication_bytes(const MachineProfile& machine, int64_t gpus);

}  // namespace kiln
