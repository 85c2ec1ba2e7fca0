// The plan of a run on the machine that it will start on, with memory counted as that machine counts it, and
// the memory choices that fit a budget there.
#pragma once
#include <cstdint>
#include <optional>

#include "plan/run/make_plan.h"

namespace kiln {

// What a process that trains on a CPU holds beside the tensors and arrays of its plan.
struct ProcessMemory {
  int64_t bytes = 0;
  double share = 0;  // share of the tensors' bytes that is added to these
};

// Measures this process as one that keeps to a budget. Runs a step of a model so small that its tensors do
// not count, so that code, threads and kernels of a step are in memory. REQUIRES: return_freed_memory() was
// called; the process has the threads that it will train with.
ProcessMemory frugal_process(const TrainOptions& options);

// Returns the memory of a process that keeps freed memory for its next use.
ProcessMemory keeping_process(const MachineProfile& machine);

struct FittedChoice {
  TrainOptions options;
  Plan plan;
};

class MachineFit {
 public:
  // Plans for each of `world_size` ranks a run on this data. `process`: that of a rank; empty on a GPU.
  // REQUIRES: `machine` and `data` outlive this.
  MachineFit(const MachineProfile& machine, const DataOutlook& data, const ProcessMemory& process,
             int64_t budget_bytes, int64_t world_size)
      : machine_(&machine), data_(&data), process_(process), budget_(budget_bytes), world_size_(world_size) {}

  // Returns the plan of the ranks with the most rows.
  Plan plan(TrainOptions options) const;

  // Returns the bytes that the device, or on a CPU the process, comes to hold.
  int64_t needed(const Plan& plan) const;

  // Returns the choice with the fewest recomputed FLOPs within the budget; nothing if none fits. GELU's
  // results of --untried-gpu are left out if the step is faster without them.
  std::optional<FittedChoice> choose(TrainOptions options) const;

  // Chooses the micro-batch too, from the rank's rows and halves of them: the fastest step that fits.
  std::optional<FittedChoice> choose_micro_batch(TrainOptions options) const;

  // Returns the options with the largest micro-batch that fits, without a copy of the state if none fits with
  // it. Nothing if none fits at all.
  std::optional<TrainOptions> nearest(const TrainOptions& options) const;

  // Does the same with the optimizer's state further away than it is: on a GPU in host memory, else on a
  // disk.
  std::optional<TrainOptions> nearest_offloaded(const TrainOptions& options) const;

  // Returns the bytes that the smallest pass needs: one image, with as much recomputed as helps.
  int64_t least(TrainOptions options) const;

 private:
  int64_t rows_of_rank(const TrainOptions& options) const;
  std::optional<FittedChoice> choose_segments(TrainOptions options) const;

  const MachineProfile* machine_;
  const DataOutlook* data_;
  ProcessMemory process_;
  int64_t budget_, world_size_;
};

}  // namespace kiln
